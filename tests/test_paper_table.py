"""The table of docs/training.md is what the committed results say."""

from benchmarks.paper import PAGE, ROWS, page, table
from rwsim.experiments import EXPERIMENTS, STUDIES


def test_the_page_is_up_to_date():
    text = PAGE.read_text()
    assert page(text) == text, "python -m benchmarks.paper writes it anew"


def test_every_experiment_has_its_row():
    assert {row.name for row in ROWS if not row.name.startswith("`")} == {*EXPERIMENTS, *STUDIES}
    assert table().count("\n") == len(ROWS) + 2


def test_a_claim_that_failed_shows(tmp_path):
    (tmp_path / "standardize").mkdir()
    heads = "subject,claim,rule,verdict,difference,interval,margin,unit,a,a_spread,b,b_spread,seeds,note"
    for verdict in ("held", "did not hold", "undecided"):
        (tmp_path / "standardize" / "table.csv").write_text(f"{heads}\nx,y,better,{verdict},1,0.5,0.5,points,2,0.1,1,0.1,5,\n")
        (line,) = [line for line in table(tmp_path).splitlines() if line.startswith("| Figure 7")]
        assert f"**{verdict}**" in line and "+1 ± 0.5 points over 5 seeds" in line
