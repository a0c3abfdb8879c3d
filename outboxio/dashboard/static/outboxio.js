// Refreshes <main> in place, and counts checked boxes. Every page works without this script.
"use strict";
(() => {
  const main = document.getElementById("main");
  const form = document.querySelector("[data-live]");
  const every = form.querySelector("[data-every]");
  const paused = form.querySelector("[data-paused]");
  const state = form.querySelector("[data-state]");

  // --- settings stored in this browser, for all pages ---------------------------------------------
  const stored = (name, value) => {
    try {
      return value === undefined ? localStorage.getItem(name) : localStorage.setItem(name, value);
    } catch {
      return null; // storage is disabled: each page starts with the defaults
    }
  };

  // --- show the result of an operation once, not again after a reload ----------------------------
  const address = new URL(location.href);
  if (address.searchParams.has("did")) {
    address.searchParams.delete("did");
    history.replaceState(history.state, "", address);
  }

  // --- checked boxes ----------------------------------------------------------------------------
  const boxes = (holder) => [...holder.querySelectorAll('input[type="checkbox"][data-one]')];
  const count = () => {
    for (const holder of main.querySelectorAll("[data-select]")) {
      const all = boxes(holder);
      const ticked = all.filter((box) => box.checked).length;
      for (const box of holder.querySelectorAll("[data-all]")) {
        box.hidden = false;
        box.checked = ticked > 0 && ticked === all.length;
        box.indeterminate = ticked > 0 && ticked < all.length;
      }
      for (const button of holder.querySelectorAll("[data-count]")) {
        button.textContent = button.dataset.count.replace("{n} ", ticked ? `${ticked.toLocaleString("en")} ` : "");
        button.disabled = ticked === 0;
      }
    }
  };
  main.addEventListener("change", (event) => {
    const holder = event.target.closest("[data-select]");
    if (event.target.matches("[data-all]")) for (const box of boxes(holder)) box.checked = event.target.checked;
    if (holder) count();
  });

  // --- the morph: turn the old nodes into the new nodes, and keep user input --------
  // getAttribute: form.id would be the field with the name "id".
  const key = (node) => (node.nodeType === 1 ? node.getAttribute("id") || node.dataset.key || "" : "");
  const fits = (old, fresh) => old.nodeName === fresh.nodeName && key(old) === key(fresh);
  const nextLike = (node, fresh) => {
    while (node && !fits(node, fresh)) node = node.nextSibling;
    return node;
  };
  const keep = new Set(["open", "data-kept"]); // whether <details> are open is the user's choice

  const attributes = (old, fresh) => {
    for (const { name, value } of fresh.attributes)
      if (!keep.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const { name } of [...old.attributes]) if (!keep.has(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  };
  const morph = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== 1) {
      old.nodeValue = fresh.nodeValue;
      return;
    }
    attributes(old, fresh);
    const known = new Map([...old.childNodes].filter(key).map((node) => [key(node), node]));
    const freshKeys = new Set([...fresh.childNodes].map(key).filter(Boolean));
    let next = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      while (next && key(next) && !freshKeys.has(key(next))) {
        const gone = next;
        next = next.nextSibling;
        gone.remove();
      }
      const match = key(child) ? known.get(key(child)) : nextLike(next, child);
      if (match && fits(match, child)) {
        if (match === next) next = next.nextSibling;
        else old.insertBefore(match, next);
        morph(match, child);
      } else {
        old.insertBefore(child, next);
      }
    }
    while (next) {
      const gone = next;
      next = next.nextSibling;
      gone.remove();
    }
  };

  // --- the refresh -----------------------------------------------------------------------------
  let timer = 0;
  let pressed = false;
  const say = (text) => (state.textContent = text);
  const time = () => new Date().toLocaleTimeString("en-GB");

  const refresh = async () => {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("main");
    if (!fresh || answer.redirected) throw new Error(`status ${answer.status}, reload the page`);
    if (paused.checked || pressed) return;
    const focused = document.activeElement;
    morph(main, fresh);
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
    document.title = page.title;
    count();
    say(`updated at ${time()}`);
  };
  const wait = () => {
    clearTimeout(timer);
    if (!paused.checked) timer = setTimeout(turn, Number(every.value) * 1000);
  };
  const turn = async () => {
    if (!document.hidden && !pressed) {
      try {
        await refresh();
      } catch (error) {
        say(`refresh failed at ${time()}: ${error.message}`);
      }
    }
    wait();
  };

  count();
  if (!document.body.hasAttribute("data-refreshes")) return;
  form.hidden = false;
  every.value = stored("outboxio-every") || "5";
  if (!every.value) every.value = "5";
  paused.checked = stored("outboxio-paused") === "yes";
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    stored("outboxio-every", every.value);
    stored("outboxio-paused", paused.checked ? "yes" : "no");
    say("");
    wait();
  });
  addEventListener("storage", () => (paused.checked = stored("outboxio-paused") === "yes") || wait());
  addEventListener("pointerdown", () => (pressed = true));
  for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => (pressed = false));
  document.addEventListener("visibilitychange", () => !document.hidden && !paused.checked && turn());
  wait();
})();
