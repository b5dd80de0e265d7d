// What cycles say of each token: where it came from, its chances, and the sums of them all.

/** The tokens of a cycle with text and origin: "accepted" by depth, "corrected", "bonus" or "plain". */
export function tokensOf(cycle, decoder) {
  const path = acceptedPath(cycle);
  return cycle.tokens.map((token, place) => {
    const node = place < cycle.accepted ? path[place] : null;
    const isLast = place === cycle.accepted;
    const origin = node ? "accepted" : cycle.accepted > 0 && isPathWhole(cycle, path) ? "bonus"
      : cycle.nodes.length ? "corrected" : "plain";
    return {
      id: token.id,
      name: token.token,
      text: token.special ? "" : decoder.decode(Uint8Array.from(token.bytes), { stream: true }),
      origin,
      depth: node ? node.depth : 0,
      p: node ? node.p : isLast ? cycle.drawn.p : null,
      q: node ? node.q : null,
      top: token.top ?? [],
    };
  });
}

/** Whether the accepted path ends in a leaf: what was drawn behind it corrects nothing. */
function isPathWhole(cycle, path) {
  const last = cycle.nodes.indexOf(path[path.length - 1]);
  return !cycle.nodes.some((node) => node.parent === last);
}

function acceptedPath(cycle) {
  return cycle.nodes.filter((node) => node.verdict === "accepted").slice(0, cycle.accepted);
}

/**
 * The traces of a saved file's text. Throws one sentence where it is none: all that is shown of a cycle must be there.
 */
export function checked(text) {
  try {
    const { kind, version, traces } = JSON.parse(text);
    const isWhole = kind === "outrider trace" && version === 1 && [1, 2].includes(traces.length)
      && traces.every((trace) => typeof trace.path === "string" && typeof trace.prompt === "string"
        && trace.cycles.length && trace.cycles.every(isCycle));
    if (isWhole) return traces;
  } catch {
    // What cannot be read is no trace either.
  }
  throw new Error("This file is no trace of Outrider: choose one that was saved here.");
}

function isCycle(cycle) {
  const isToken = (token) => typeof token.token === "string" && typeof (token.p ?? 0) === "number";
  return typeof cycle.at === "number" && typeof cycle.seconds === "object" && isToken(cycle.drawn)
    && cycle.nodes.every((node, i) => isToken(node) && node.parent < i)
    && cycle.tokens.length && cycle.tokens.every((token) => isToken(token) && Array.isArray(token.bytes));
}

/** Running sums over cycles. A cycle is a decode pass; the token of the prompt's own pass belongs to none. */
export class Sums {
  constructor() {
    Object.assign(this, { tokens: 0, cycles: 0, accepted: 0, drafted: 0, guessedAt: [], acceptedAt: [], rows: [] });
    this.speedUp = null; // the server's estimate so far: {ratio, low, high}
  }

  add(cycle) {
    this.tokens += cycle.tokens.length;
    this.drafted += cycle.nodes.length;
    this.accepted += cycle.accepted;
    this.speedUp = cycle.speed_up ?? this.speedUp;
    if (this.rows.length) this.cycles += 1;
    const deepest = Math.max(0, ...cycle.nodes.map((node) => node.depth));
    for (let depth = 0; depth < deepest; depth += 1) {
      this.guessedAt[depth] = (this.guessedAt[depth] ?? 0) + 1;
      this.acceptedAt[depth] = (this.acceptedAt[depth] ?? 0) + (depth < cycle.accepted ? 1 : 0);
    }
    this.rows.push({ at: cycle.at, count: cycle.tokens.length, tau: this.tau, speed: this.speed(cycle.at) });
  }

  get tau() {
    return this.cycles ? 1 + this.accepted / this.cycles : null;
  }

  /** Tokens per second since the first one; null until there is time enough to tell. */
  speed(at) {
    const first = this.rows[0];
    return first && at > first.at + 0.05 ? (this.tokens - first.count) / (at - first.at) : null;
  }
}
