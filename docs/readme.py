"""Run the main job and put its table and figure into README.md and docs/walk.png: `python docs/readme.py`."""

import re
from pathlib import Path

import rwsim
from rwsim.plots import save_validation
from rwsim.tables import markdown

TOP = Path(__file__).parent.parent


def main() -> None:
    result = rwsim.validate()
    readme = TOP / "README.md"
    table = f"<!-- table: written by docs/readme.py -->\n{markdown(result)}\n<!-- end of table -->"
    readme.write_text(re.sub(r"<!-- table.*<!-- end of table -->", lambda _: table, readme.read_text(), flags=re.DOTALL))
    save_validation(result, TOP / "docs")
    print(f"{result.seconds:.0f} s, {'all agree' if result.passed else 'NOT all agree'}")


if __name__ == "__main__":
    main()
