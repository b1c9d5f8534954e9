// Loads the page again when the store was looked at, and puts in place what has changed. Without it, a reload does.
"use strict";
(() => {
  const events = document.currentScript.dataset.events;
  let source = null;
  let loading = false;
  let again = false;

  async function load() {
    if (loading) { again = true; return; }
    loading = true;
    try {
      const answer = await fetch(location.href, { headers: { "X-Live": "1" } });
      if (answer.redirected) { location.reload(); return; }  // to the login
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) {
        const title = page.querySelector("h1")?.textContent ?? `The dashboard has answered ${answer.status}`;
        say(`${title}. This page shows what was known before.`);
        return;
      }
      for (const part of document.querySelectorAll("[data-live], #state")) {
        const other = page.getElementById(part.id);
        if (other === null || other.innerHTML === part.innerHTML) continue;
        if (part.contains(document.activeElement) && document.activeElement.matches("input, button")) continue;
        const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        part.innerHTML = other.innerHTML;
        if (focused !== null) {
          for (const link of part.querySelectorAll("a")) if (link.getAttribute("href") === focused) link.focus();
        }
      }
    } catch {
      // The next event tries again; the stream says whether the dashboard is there.
    } finally {
      loading = false;
      if (again) { again = false; load(); }
    }
  }

  function say(text) {
    const state = document.getElementById("state");
    if (state.textContent === text) return;
    const alarm = document.createElement("strong");
    alarm.className = "alarm";
    alarm.setAttribute("role", "alert");
    alarm.textContent = text;
    state.replaceChildren(alarm);
  }

  function open() {
    if (source !== null || document.hidden) return;
    source = new EventSource(events);
    source.addEventListener("look", load);
    source.addEventListener("error", () => {
      say("The dashboard does not answer; trying again.");
      if (source === null || source.readyState !== EventSource.CLOSED) return;
      source = null;  // an answer that is no stream, as a proxy's or the login: the browser does not try again
      load();
      setTimeout(open, 3000);
    });
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden && source !== null) { source.close(); source = null; } else { open(); }
  });
  open();
})();
