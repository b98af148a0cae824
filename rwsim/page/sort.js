(() => {
  "use strict";
  const said = document.createElement("p");
  said.className = "unseen";
  said.setAttribute("role", "status");
  document.body.append(said);
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  for (const table of document.querySelectorAll("table.sorts")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const original = [...body.rows];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
      };
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const order = now === "ascending" ? "descending" : "ascending";
        const numbers = original.some((row) => row.cells[column].dataset.v !== undefined);
        const keys = new Map(original.map((row) => [row, key(row)]));
        const sign = order === "ascending" ? 1 : -1;
        const sorted = [...original].sort((one, other) => {
          const [a, b] = [keys.get(one), keys.get(other)];
          if (!numbers) return sign * compare(a, b);
          // What is not a number comes last, whichever way.
          if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
          return typeof a === "number" ? sign * (a - b) : compare(a, b);
        });
        heads.forEach((other) => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", order);
        body.append(...sorted);
        said.textContent = `Sorted by ${button.textContent.trim()}, ${order}.`;
      });
    });
  }
})();
