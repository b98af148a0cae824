"""`rwsim explore`."""

import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rwsim.cli.shared import HOLDS, OUTPUT, Whole, check_place
from rwsim.errors import InvalidArgument


def explore(
    *,
    port: Whole = 8321,
    browser: bool = True,
    static: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """A page with sliders: norm, rotation and their path at any hyperparameters, the paper's forms against the exact ones.

    It opens in the browser, served to this machine only, with a button that simulates the point. Ctrl-C ends it. With --static it is
    written as one file that needs no server.

    ```sh
    rwsim explore
    rwsim explore --static explore.html
    ```

    Parameters
    ----------
    port
        Of the server; 0 takes any that is free.
    browser
        Open the page in a browser.
    static
        Write the page to this file instead, without the simulation.
    quiet
        Print nothing but errors.
    """
    if not 0 <= port < 1 << 16:
        raise InvalidArgument("port", "must lie in [0, 65535]", port, "0 takes any that is free")
    if static is not None:
        check_place("--static", static, folder=False)
        from rwsim.explore.document import document

        text = document()
        static.parent.mkdir(parents=True, exist_ok=True)
        static.write_text(text, encoding="utf-8")
        if not quiet:
            print(f"Written to {static}")
        return HOLDS
    from rwsim.explore.document import document
    from rwsim.explore.server import Server

    def answer(given: object) -> dict[str, object]:
        from rwsim.explore.setting import check
        from rwsim.explore.simulate import simulate

        return simulate(check(given))

    with Server(port, document, answer) as server:
        if not quiet:
            print(f"{server.address}   (Ctrl-C ends it)", flush=True)
        if browser:
            import webbrowser

            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        server.serve_forever()
    return HOLDS
