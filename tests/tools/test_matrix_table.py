"""tools/matrix_table.py: the table of the versions of Python and torch on which the tests passed."""

from tests.support.tools import load_tool

JUNIT = """<testsuites><testsuite>
<testcase classname="checks.a" name="test_one"/>
<testcase classname="checks.a" name="test_two"><failure/></testcase>
<testcase classname="checks.a" name="test_three"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_result_replaces_the_row_of_its_versions_and_rows_are_sorted(tmp_path, capsys):
    tool = load_tool("matrix_table.py")
    (tmp_path / "junit.xml").write_text(JUNIT)
    page = tmp_path / "page.md"
    page.write_text("# Before\n<!-- matrix -->\n| 3.11 | 2.9.1 | 5,120 | 1 | 0 |\n<!-- end of matrix -->\nafter\n")
    for torch in ("2.13.0", "2.9.1", "2.15.0"):
        given = [str(tmp_path / "junit.xml"), "--torch", torch, "--python", "3.11", "--page", str(page)]
        assert tool.main(given) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Python 3.11, torch 2.13.0: 1 passed, 1 skipped, 1 failed\nchecks.a::test_two\n")
    rows = "".join(f"| 3.11 | {torch} | 1 | 1 | 1 |\n" for torch in ("2.9.1", "2.13.0", "2.15.0"))
    heading = "| Python | torch | passed | skipped | failed |\n|:---|:---|---:|---:|---:|\n"
    assert page.read_text() == f"# Before\n<!-- matrix -->\n{heading}{rows}<!-- end of matrix -->\nafter\n"
