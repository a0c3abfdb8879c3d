// Adds the button "Copy page" to each page. It copies the page's Markdown, which is beside the page: page.html, page.md.
const source = location.pathname.endsWith("/")
  ? `${location.pathname}index.md`
  : location.pathname.replace(/\.html$/, ".md");

function addCopyButton() {
  const heading = document.querySelector(".md-content h1");
  if (!heading || location.protocol === "file:" || document.querySelector(".copy-page")) return;
  const box = document.createElement("div");
  const button = document.createElement("button");
  const link = document.createElement("a");
  box.className = "copy-page";
  button.type = "button";
  button.textContent = "Copy page";
  button.title = "Copy this page as Markdown";
  link.href = source;
  link.textContent = "View as Markdown";
  box.append(button, link);
  heading.after(box);
  button.addEventListener("click", async () => {
    try {
      const answer = await fetch(source);
      if (!answer.ok) throw new Error(`${source}: ${answer.status}`);
      await navigator.clipboard.writeText(await answer.text());
      button.textContent = "Copied";
    } catch (error) {
      console.error(error);
      button.textContent = "Copy failed: open the Markdown";
    }
    setTimeout(() => (button.textContent = "Copy page"), 2000);
  });
}

addCopyButton();
