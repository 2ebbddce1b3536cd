"""Tables of a report: order, hidden columns, rows that are not shown, and how text shortens them."""

from fractions import Fraction

from fvflops.reports.document import Document, Table, data_only, difference_column, number_column, text_column
from fvflops.reports.formats import write_document

COLUMNS = (
    text_column("op", shorten_last=True),
    number_column("flops", "FLOPs"),
    difference_column("change"),
    text_column("note"),
)
ROWS = [("mm", 10, -900, "b"), ("add", 30, 5, ""), ("relu", 20, 40, "a")]


def table(only_data=(), **options):
    return Table("ops", data_only(COLUMNS, only_data), ROWS, noun="op", **options)


def test_differences_are_sorted_by_magnitude_and_other_numbers_by_value():
    assert [row[0] for row in table().ranked(sort="change").rows] == ["mm", "relu", "add"]
    assert [row[0] for row in table().ranked(sort="flops").rows] == ["add", "relu", "mm"]


def test_rows_that_are_not_shown_are_summed():
    assert table(summed="change").ranked(top=1).notes == ("2 more ops: change +45.",)
    assert table(summed="change").ranked(top=3).notes == ()
    assert table().ranked(top=1).notes == ("2 more ops.",)


def test_columns_for_data_and_empty_tables_are_in_data_formats_alone():
    document = Document("x", "", [table(("note", "change")), Table("none", COLUMNS, [], title="Nothing")])
    assert write_document(document).split() == ["op", "FLOPs", "----", "-----", "mm", "10", "add", "30", "relu", "20"]
    assert write_document(document, "csv").startswith("op,flops,change,note\nmm,10,-900,b\n")
    for format in ("markdown", "html", "latex"):
        written = write_document(document, format)
        assert "change" not in written.partition("<script")[0] and "Nothing" not in written
    nothing = Document("x", "Title", [table([column.key for column in COLUMNS])])
    assert write_document(nothing) == "Title"


def test_other_tables_are_sorted_with_the_main_one_where_they_can_be():
    other = Table("other", (text_column("name"), number_column("time")), [("b", 1), ("a", 2), ("c", 3)])
    document = Document("x", "", [table(), other], main="ops", also=("other",)).ranked(sort="flops", top=2)
    ops, others = document.tables()
    assert [row[0] for row in ops.rows] == ["add", "relu"]
    assert [row[0] for row in others.rows] == ["b", "a"]
    others = Document("x", "", [table(), other], main="ops", also=("other",)).ranked(sort="name").tables()[1]
    assert [row[0] for row in others.rows] == ["a", "b", "c"]


def test_a_column_to_keep_is_shortened_last_and_stays_when_numbers_go():
    rows = [("a_module." * 4, 123456789, 1, "x" * 60), ("b", 1, -1, "")]
    text = write_document(Document("x", "", [Table("ops", COLUMNS, rows)]), width=90)
    assert "a_module." * 4 in text and max(map(len, text.split("\n"))) <= 90
    narrow = write_document(Document("x", "", [Table("ops", COLUMNS, rows)]), width=45)
    assert max(map(len, narrow.split("\n"))) <= 45


def test_a_fraction_is_written_exactly():
    document = Document(
        "x", "", [Table("ops", (text_column("op"), number_column("f", form=str)), [("mm", Fraction(1, 3))])]
    )
    assert write_document(document, "csv").splitlines()[1] == "mm,1/3"
    assert '"f": "1/3"' in write_document(document, "json")


def test_people_are_shown_no_column_without_a_value_and_data_has_it():
    columns = text_column("name"), number_column("rank"), number_column("flops")
    table = Table("x", columns, [("a", None, 0), ("b", None, 2)])
    assert [column.key for column in table.readable_by("people").columns] == ["name", "flops"]
    assert table.readable_by("data") == table
