// A text made of tokens: each coloured by its origin, each able to tell its chances, by pointer or by keyboard.

import { chance } from "./draw.js";
import { tokensOf } from "./trace.js";

const WORDS = {
  accepted: (token) => `guessed at depth ${token.depth} and accepted`,
  corrected: () => "drawn instead of a guess",
  bonus: () => "drawn behind accepted guesses",
  plain: () => "drawn without a guess",
};

export class TokenText {
  /** @param onChoose called with the cycle of a token that was pointed at or reached by keyboard */
  constructor(element, card, onChoose) {
    this.element = element;
    this.card = card;
    this.onChoose = onChoose;
    this.tokens = [];
    this.chosen = -1;
    element.addEventListener("pointermove", (event) => this.point(event));
    element.addEventListener("pointerleave", () => this.leave());
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("blur", () => this.leave());
  }

  clear() {
    this.element.replaceChildren();
    this.tokens = [];
    this.chosen = -1;
    this.begin();
  }

  /** A new completion begins: half a character of the last one is forgotten. */
  begin() {
    this.decoder = new TextDecoder();
  }

  /** What a person said, or the prompt that is continued. */
  say(text) {
    const element = document.createElement("div");
    element.className = "said";
    element.textContent = text;
    this.element.append(element);
  }

  add(cycle) {
    const isAtEnd = this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 40;
    for (const token of tokensOf(cycle, this.decoder)) {
      const span = document.createElement("span");
      span.className = `token ${token.origin} ${token.depth ? `d${Math.min(6, token.depth)}` : ""}`;
      span.textContent = token.text;
      span.dataset.index = this.tokens.length;
      this.tokens.push({ ...token, cycle, span });
      this.element.append(span);
    }
    if (isAtEnd) this.element.scrollTop = this.element.scrollHeight;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  point(event) {
    const index = event.target.dataset?.index;
    if (index === undefined) this.leave();
    else this.choose(Number(index));
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const places = { Home: 0, End: this.tokens.length - 1 };
    if (event.key === "Escape") this.leave();
    if (!this.tokens.length || !(event.key in moves || event.key in places)) return;
    event.preventDefault();
    const wanted = places[event.key] ?? this.chosen + moves[event.key];
    this.choose(Math.min(this.tokens.length - 1, Math.max(0, wanted)));
    this.tokens[this.chosen].span.scrollIntoView({ block: "nearest" });
  }

  choose(index) {
    if (index === this.chosen) return;
    this.tokens[this.chosen]?.span.classList.remove("chosen");
    this.chosen = index;
    const token = this.tokens[index];
    token.span.classList.add("chosen");
    this.onChoose(token.cycle);
    this.tell(token);
  }

  leave() {
    this.tokens[this.chosen]?.span.classList.remove("chosen");
    this.chosen = -1;
    this.card.hidden = true;
  }

  tell(token) {
    const table = document.createElement("table");
    table.createCaption().textContent = JSON.stringify(token.name);
    const rows = [
      ["origin", WORDS[token.origin](token)],
      ["p (target)", chance(token.p)],
      ["q (drafter)", chance(token.q)],
      ["cycle", `${counted(token.cycle.tokens.length)} in ${milliseconds(token.cycle.seconds.total)}`],
      ...(token.top.length ? [["likeliest", "by the model's own law"]] : []),
      ...token.top.map(([name, logprob]) => [JSON.stringify(name), `${(100 * Math.exp(logprob)).toFixed(1)} %`]),
    ];
    for (const row of rows) {
      const line = table.insertRow();
      for (const cell of row) line.insertCell().textContent = cell;
    }
    this.card.replaceChildren(table);
    this.card.hidden = false;
    const place = token.span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const below = place.bottom + 8 + height < innerHeight;
    this.card.style.left = `${Math.max(8, Math.min(place.left, innerWidth - width - 8))}px`;
    this.card.style.top = `${below ? place.bottom + 8 : Math.max(8, place.top - height - 8)}px`;
  }
}

function counted(tokens) {
  return tokens === 1 ? "1 token" : `${tokens} tokens`;
}

function milliseconds(seconds) {
  return seconds === undefined ? "–" : `${(seconds * 1000).toFixed(1)} ms`;
}
