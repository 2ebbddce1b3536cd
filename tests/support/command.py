"""Run a command of fvflops in this process."""

from fvflops.cli import main


def run(capsys, *argv):
    """Return the exit code of a command, and what it wrote to standard output and error."""
    try:
        code = main([*argv])
    except SystemExit as error:  # of the parser
        code = error.code
    return code, *capsys.readouterr()


def output_of(capsys, *argv):
    """Return the output of a command that succeeds."""
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    return out
