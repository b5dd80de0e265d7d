// Speaks with the server: the model's card, and streams with every cycle's trace.

export async function card(key) {
  const answer = await fetch("/v1/models", { headers: head(key) });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  return body.data[0];
}

/**
 * Asks, and yields each cycle as it comes: {at, tokens, accepted, nodes, drawn, seconds}, its tokens with `top`,
 * the likeliest alternatives. Returns {usage, seed, exactness, reason} at the end.
 */
export async function* ask(path, body, key, signal) {
  const began = performance.now();
  const told = {
    ...body, stream: true, stream_options: { include_usage: true },
    speculation: { ...body.speculation, trace: true },
  };
  Object.assign(told, path.includes("chat") ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  const answer = await fetch(path, {
    method: "POST", headers: { ...head(key), "Content-Type": "application/json" }, body: JSON.stringify(told), signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const end = {};
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    end.seed = event.seed;
    end.exactness = event.exactness ?? end.exactness;
    end.usage = event.usage ?? end.usage;
    const choice = event.choices[0];
    end.reason = choice?.finish_reason ?? end.reason;
    if (event.speculation) {
      const rows = alternatives(choice.logprobs);
      const tokens = event.speculation.tokens.map((token, i) => ({ ...token, top: rows[i] ?? [] }));
      yield { ...event.speculation, tokens, at: (performance.now() - began) / 1000 };
    }
  }
  return end;
}

function head(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Of each token the likeliest [name, log-probability], best first, from either route's shape. */
function alternatives(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((row) => row.top_logprobs.map((top) => [top.token, top.logprob]));
  return logprobs.top_logprobs.map((row) => Object.entries(row ?? {}).sort((a, b) => b[1] - a[1]));
}

async function* events(stream) {
  let held = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const whole = held.split("\n\n");
      held = whole.pop();
      for (const event of whole) {
        const data = event.replace(/^data: /, "");
        if (data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
