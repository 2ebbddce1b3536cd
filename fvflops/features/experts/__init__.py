"""Find mixture-of-experts layers and the share of parameters that works on a token."""
