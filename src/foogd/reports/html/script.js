"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  root.classList.add("scripted");

  // Theme: as the system says, until a reader chooses.
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const remembered = () => { try { return localStorage.getItem("foogd-theme"); } catch { return null; } };
  const remember = (name) => { try { localStorage.setItem("foogd-theme", name); } catch { /* a page without storage forgets */ } };
  const paint = (name) => {
    if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    button.dataset.name = name;
  };
  paint(themes.includes(remembered()) ? remembered() : "auto");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(button.dataset.name) + 1) % themes.length];
    remember(next);
    paint(next);
  });

  // Tables: a head sorts by the numbers of its column, largest first, then the other way round.
  const value = (row, index) => {
    const cell = row.cells[index];
    const text = cell.dataset.v ?? cell.textContent.trim();
    const number = text === "" ? NaN : Number(text);
    return { text, number };
  };
  for (const table of all("table.sortable")) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, index) => head.querySelector("button")?.addEventListener("click", () => {
      const words = head.classList.contains("words");
      const was = head.getAttribute("aria-sort");
      const down = was === "none" ? !words : was === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      const keyed = rows.map((row, place) => ({ row, place, ...value(row, index) }));
      const numeric = keyed.some((one) => !Number.isNaN(one.number));
      keyed.sort((a, b) => {
        if (!numeric) return (down ? -1 : 1) * a.text.localeCompare(b.text) || a.place - b.place;
        if (Number.isNaN(a.number) || Number.isNaN(b.number)) return Number.isNaN(a.number) - Number.isNaN(b.number);
        return (down ? b.number - a.number : a.number - b.number) || a.place - b.place;
      });
      table.tBodies[0].append(...keyed.map((one) => one.row));
    }));
  }

  // Legends: a key hides its series in all charts around it.
  for (const key of all(".key")) {
    key.addEventListener("click", () => {
      const on = key.getAttribute("aria-pressed") !== "true";
      key.setAttribute("aria-pressed", String(on));
      for (const part of all("[data-series]", key.closest(".charts"))) {
        if (part.dataset.series === key.dataset.key) part.classList.toggle("off", !on);
      }
    });
  }

  // Menus: one panel of a group is shown; a setting chosen in one section is chosen in all.
  for (const group of all(".switch")) {
    const panels = [...group.children].filter((child) => child.classList.contains("panel"));
    const menu = group.querySelector("select");
    menu.show = () => panels.forEach((panel) => panel.classList.toggle("shown", panel.dataset.panel === menu.value));
    menu.addEventListener("change", () => {
      const chosen = menu.selectedOptions[0].text;
      for (const other of all("select[data-menu]").filter((one) => one.dataset.menu === menu.dataset.menu)) {
        const same = [...other.options].find((option) => option.text === chosen);
        if (same) { other.value = same.value; other.show(); }
      }
    });
    menu.show();
  }
  for (const menu of all("select[data-paint]")) {
    menu.addEventListener("change", () => { menu.closest(".painted").dataset.paint = menu.value; });
  }

  // Contents: closed on a small screen; marks the section in view.
  if (window.innerWidth < 1080) document.querySelector("nav details").open = false;
  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const watch = new IntersectionObserver((seen) => {
    for (const one of seen) links.get(one.target.id)?.classList.toggle("here", one.isIntersecting);
  }, { rootMargin: "-10% 0px -80% 0px" });
  all("section, #top").forEach((part) => watch.observe(part));
})();
