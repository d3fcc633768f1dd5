"use strict";

// What the pages do beside being read: walk through tokens, copy, and show what is new.
const LOOK_MS = 2000;

function tell(strip, token) {
  strip.querySelector("i.here")?.classList.remove("here");
  token.classList.add("here");
  const turn = token.closest("[data-turn]").dataset.turn;
  strip.nextElementSibling.textContent = `${JSON.stringify(token.textContent)} · turn ${turn} · ${token.title}`;
}

document.addEventListener("mouseover", (event) => {
  const token = event.target.closest?.(".strip i");
  if (token) tell(token.closest(".strip"), token);
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input, select, textarea");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    document.getElementById("find").focus();
    return;
  }
  const strip = event.target.closest?.(".strip");
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
  if (strip === event.target && step) {
    event.preventDefault();
    const tokens = [...strip.querySelectorAll("i")];
    const here = tokens.findIndex((token) => token.classList.contains("here"));
    const next = here < 0 ? 0 : Math.min(Math.max(here + step, 0), tokens.length - 1);
    if (!tokens.length) return;
    tell(strip, tokens[next]);
    tokens[next].scrollIntoView({ block: "nearest" });
  }
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const text = document.getElementById(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // No clipboard without TLS or permission: what is selected can be copied by hand.
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    button.textContent = "Selected";
  }
});

// New rows: lists are exchanged in place, a page that somebody reads only says that there is more.
const LISTS = ["/", "/rollouts"];

async function look() {
  if (document.hidden) return;
  const answer = await fetch("/stamp").catch(() => null);
  if (!answer?.ok) return;
  const stamp = await answer.text();
  if (stamp === document.body.dataset.stamp) return;
  document.body.dataset.stamp = stamp;
  const news = document.getElementById("news");
  const busy = document.getElementById("main").contains(document.activeElement?.closest("input, select"));
  if (!LISTS.includes(location.pathname) || busy) {
    news.textContent = "The dataset has changed since this page was made.";
    return;
  }
  const page = await fetch(location.href).catch(() => null);
  if (!page?.ok) return;
  const fresh = new DOMParser().parseFromString(await page.text(), "text/html");
  document.getElementById("main").replaceChildren(...fresh.getElementById("main").childNodes);
  news.textContent = "New rows are shown.";
}

setInterval(look, LOOK_MS);
