// Copies ids, and focuses the search box. Every page works without this script.
"use strict";
(() => {
  // --- copy ids ---------------------------------------------------------------------------------
  document.documentElement.classList.add("scripted"); // shows the buttons
  const announcer = document.querySelector("[data-announcer]");
  const copied = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = document.createElement("textarea"); // on a page without HTTPS
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  };
  addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await copied(button.dataset.copy);
    button.focus();
    button.classList.add("done");
    announcer.textContent = `copied ${button.dataset.copy}`;
    setTimeout(() => button.classList.remove("done"), 1500);
  });

  // --- / focuses the search ---------------------------------------------------------------
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    document.querySelector(".find input").select();
  });
})();
