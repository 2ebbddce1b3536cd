"""ViT-B/16, a vision transformer on 16x16 patches of a 224x224 image.

Published in Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv:2010.11929, table 1: 86M parameters).
Same as torchvision's `vit_b_16`, whose page states 86,567,656 parameters and 17.56 GMACs, but with an
attention of one `qkv` linear and `scaled_dot_product_attention`. There is no dropout: its published probability is 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, PATCH = 224, 16
WIDTH, MLP_WIDTH, HEADS, LAYERS = 768, 3072, 12, 12
NORM_EPS = 1e-6


class Attention(nn.Module):
    """Self-attention of every position with every position: (b, n, width) to (b, n, width)."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)  # (b, heads, n, width/heads)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """A pre-norm transformer layer: (b, n, width) to (b, n, width)."""

    def __init__(self, width: int, *, heads: int, mlp_width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.self_attention = Attention(width, heads=heads)
        self.ln_2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_width), nn.GELU(), nn.Linear(mlp_width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ViTB16(nn.Module):
    """ViT-B/16: 86,567,656 parameters, 17,563,828,224 multiply-adds per 224x224 image.

    Of these 715,327,488 are the two matrix products of attention. Takes images (b, 3, 224, 224), returns logits
    (b, classes); raises ValueError for another image size.

    >>> with torch.device("meta"):
    ...     model = ViTB16()
    >>> sum(p.numel() for p in model.parameters())
    86567656
    """

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__()
        positions = (IMAGE // PATCH) ** 2 + 1
        self.conv_proj = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embedding = nn.Parameter(torch.empty(1, positions, WIDTH).normal_(std=0.02))
        self.layers = nn.Sequential(*(EncoderLayer(WIDTH, heads=HEADS, mlp_width=MLP_WIDTH) for _ in range(LAYERS)))
        self.ln = nn.LayerNorm(WIDTH, eps=NORM_EPS)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (IMAGE, IMAGE):
            raise ValueError(f"x is {tuple(x.shape)}: ViT-B/16 takes (b, 3, {IMAGE}, {IMAGE}), resize the images")
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], dim=1)
        x = self.ln(self.layers(x + self.pos_embedding))
        return self.head(x[:, 0])
