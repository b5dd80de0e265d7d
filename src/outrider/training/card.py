"""The model card of a trained drafter: what it is for, how it was made, and what it was seen to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPEED = "It was not faster than plain decoding there; leave speculation off, or train it longer."


def card(provenance: Mapping[str, Any]) -> str:
    """Markdown from the provenance of one drafter (`outrider train` writes both)."""
    made, seen, target = provenance["training"], provenance["figures"], provenance["target"]["name"]
    drafter, served = provenance["drafter"], seen["served"]
    held_out = made["held_out"]
    hits = " ".join(f"{rate:.2f}" for rate in held_out["hit"])
    speed = seen["speed"]
    kind = f" with {speed['dtype']} weights" if "dtype" in speed else ""
    lines = [
        f"# {drafter} for {target}",
        "",
        f"A drafter for speculative decoding with Outrider. It changes no text of `{target}`, only how soon it comes:",
        "",
        "```console",
        f'$ outrider generate {target} "..." --drafter {drafter} --drafter-model THIS_FOLDER',
        "```",
        "",
        "## How it was made",
        "",
        f"`{provenance['command']}`, commit {provenance['commit']}, {provenance['date']}; "
        + ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
        + f"; on {provenance['device']}.",
        "",
        f"It learned from the target's own replies (data {provenance['data']['sha256'][:16]}, "
        f"{provenance['data']['reply_tokens']:,} reply tokens) in {made['steps']:,} steps over {made['tokens']:,} "
        f"tokens, {made['seconds']:,.0f} s; {made['parameters']:,} parameters; the ids that it knows cover "
        f"{made['coverage']:.1%} of what the target says.",
        "",
        "## What it was seen to do",
        "",
        f"- On held-out text, guess by guess, the likeliest token was right in {hits} of cases (positions 1, 2, ...), "
        f"which gives a greedy chain a tau of {held_out['tau']:.2f}.",
        f"- Served by the engine on held-out prompts: tau {served['tau']:.2f} at depth {served['depth']} "
        f"({served['cycles']} cycles).",
        f"- `check`: {seen['check']['compared']} texts compared with plain decoding, "
        f"{seen['check']['differing']} differ.",
        f"- Speed on {speed['device']}{kind}: {speed['tokens_per_second']:.1f} tokens/s, {speed['ratio_to_plain']:.2f} "
        f"times plain decoding (median over {speed['runs']} prompts). "
        + ("" if speed["ratio_to_plain"] > 1 else _SPEED),
        "",
        "The licence is that of its target.",
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"
