"""The loop that trains any drafter: batches, frozen target, loss, optimisers, checkpoints, reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from torch import Tensor

from outrider.errors import NumericsError
from outrider.models.checks import first_line
from outrider.registry import TRAINED
from outrider.training import vocabulary
from outrider.training.base import DraftModule, build
from outrider.training.checkpoint import Checkpoints, State, fingerprint
from outrider.training.corpus import Batch, Corpus
from outrider.training.harvest import Features, Harvester
from outrider.training.losses import Arithmetic
from outrider.training.optimizers import optimizers
from outrider.training.report import Report, Trained, Window
from outrider.training.settings import MEASURED_STEPS, TrainConfig, is_measured, rate

USABLE = 0.92
"""Share of the time left that goes into steps; the rest is for evaluations, checkpoints and the end."""
_FREE_TO_CHANGE = ("log_every", "evaluate_every", "measure_every", "checkpoint_every", "checkpoint_seconds", "fuse")
"""Settings that do not change the weights."""

Measure = Callable[[Trained], Mapping[str, Any]]


def train(
    drafter: str,
    module: Any,
    corpus: Corpus,
    config: TrainConfig,
    *,
    work: Path,
    vocab_size: int,
    eos_ids: Iterable[int] = (),
    settings: Mapping[str, Any] | None = None,
    initial: Mapping[str, Tensor] | None = None,
    progress: Callable[[Report], None] = lambda report: None,
    measure: Measure | None = None,
) -> Trained:
    """Train a drafter for a target on the target's own replies; goes on from the last checkpoint of `work`, if any.

    Under `torchrun` or `accelerate launch` every process gets its share of the batches; `progress` and `measure` are
    called in the first one only.

    Args:
        drafter: a name of `registry.TRAINED`. module: the target, a Transformers causal language model, on its device
            in the float type it is to run in; it is frozen. vocab_size, eos_ids: of the target.
        settings: sizes of the drafter, by its own names. initial: tensors of a trained drafter of the same kind and
            sizes to begin with; its ids are kept. work: folder of the checkpoints.
        measure: called every `measure_every` steps with what there is, for figures that need the engine.

    Raises:
        TrainingError: if the corpus is too small or another model's, the disk is full, or `work` holds a run of other
            settings. ConfigError: for an unknown drafter or setting. ModelError: if the target cannot be learnt from.
        NumericsError: if the loss is not a number; the last checkpoint stays.
    """
    made = dict(settings or {})
    run = _Run(drafter, module, corpus, config, work, vocab_size, tuple(eos_ids), made, initial, progress, measure)
    return run.run()


class _Run:
    """One call of `train`."""

    def __init__(
        self,
        drafter: str,
        module: Any,
        corpus: Corpus,
        config: TrainConfig,
        work: Path,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        settings: dict[str, Any],
        initial: Mapping[str, Tensor] | None,
        progress: Callable[[Report], None],
        measure: Measure | None,
    ) -> None:
        kind: type[DraftModule] = TRAINED[drafter]
        self.drafter, self.config, self.progress, self.measure = drafter, config, progress, measure
        on_gpu = module.device.type == "cuda"
        self.accelerator = Accelerator(
            mixed_precision="bf16" if on_gpu else "no",
            cpu=not on_gpu,
            gradient_accumulation_steps=config.accumulate,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        self.device = self.accelerator.device
        module = module.to(self.device)
        self.corpus, self.held_out = corpus.split(config.held_out)
        if kind.full_vocabulary:
            self.vocabulary = vocabulary.whole(vocab_size)
        elif initial is not None:
            self.vocabulary = vocabulary.kept(self.corpus, initial["kept_ids"], vocab_size)
        else:
            self.vocabulary = vocabulary.choose(self.corpus, config.vocabulary, vocab_size, eos_ids)
        torch.manual_seed(config.seed)
        self.bare = build(kind, module, self.vocabulary.kept_ids, settings, initial).to(self.device)
        arithmetic = Arithmetic(config.loss, config.chunk)
        self.harvester = Harvester(module, self.vocabulary.kept_ids, self.bare.taps, vocab_size, arithmetic)
        self.model, *self.optimizers = self.accelerator.prepare(self.bare, *optimizers(self.bare, config))
        self.peak = config.learning_rate or kind.learning_rate
        self.state = State(horizon=config.steps)
        self.checkpoints = Checkpoints(work, self.accelerator, self.state, self._identity(settings, initial))

    def run(self) -> Trained:
        resumed = self.checkpoints.resume()
        self.began = self.saved = time.monotonic()
        self.before = self.state.seconds
        if resumed:
            self._tell("note", note=f"goes on from step {self.state.done}")
        self._fuse()
        self.mark = (self.state.done, time.monotonic())
        self.model.train()
        batches = self._batches()
        window = Window()
        while self.state.horizon is None or self.state.done < self.state.horizon:
            self._advance(batches, window)
            self._look(window)
        return self._finish()

    def _advance(self, batches: Iterator[Batch], window: Window) -> None:
        """One optimiser step; nothing here waits for the device."""
        state, config = self.state, self.config
        self.rate = self.peak * rate(config, state.done, state.horizon)
        for group in chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers):
            group["lr"] = self.rate
        for _ in range(config.accumulate):
            batch = next(batches)
            with self.accelerator.accumulate(self.model):
                loss, counts = self.model(batch, self.harvester(batch))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            window.add(loss.detach(), counts, batch.num_tokens)
            state.batches += 1
            state.tokens += batch.num_tokens * self.accelerator.num_processes
        state.done += 1

    def _look(self, window: Window) -> None:
        """After a step: reports, evaluations, checkpoints, the horizon of a timed run; each when its time has come."""
        state, config, done = self.state, self.config, self.state.done
        if config.seconds is not None and is_measured(done, state.horizon):
            self._measure_speed(done)
        if done % config.log_every == 0:
            self._report(window)
        last = done == state.horizon
        if done % config.evaluate_every == 0 and not last:
            self._tell("held_out", self._evaluate())
        if config.measure_every and done % config.measure_every == 0 and not last:
            self._ask()
        if not last and (done % config.checkpoint_every == 0 or (done % config.log_every == 0 and self._is_due())):
            self._save()

    def _batches(self) -> Iterator[Batch]:
        """This process' batches on the device, from where the run stands on, pass after pass over the corpus."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        while True:
            first = self.state.batches
            skip = first * processes + rank
            for batch in self.corpus.batches(
                self.config.batch_tokens, self.config.seed + self.state.epoch, skip, processes
            ):
                yield batch.to(self.device)
            self.state.epoch += 1
            self.state.batches = 0

    def _fuse(self) -> None:
        """Compile what can be, and try it on one batch; where that fails everything runs as it is written."""
        wanted = self.config.fuse
        if wanted is False or (wanted is None and self.device.type != "cuda"):
            return
        self.harvester.fuse()
        self.bare.fuse()
        try:
            batch = next(self.corpus.batches(self.config.batch_tokens, self.config.seed)).to(self.device)
            self.accelerator.backward(self.model(batch, self.harvester(batch))[0])
        except Exception as error:  # compilers fail in many ways, and none of them changes what is to be computed
            self.harvester.unfuse()
            self.bare.unfuse()
            self._tell("note", note=f"torch.compile failed ({first_line(error)}): training goes on without it, slower")
        self.bare.zero_grad()

    def _measure_speed(self, done: int) -> None:
        """Set the horizon of a timed run from the speed since the last mark; the first mark leaves compiling out."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        if done >= MEASURED_STEPS:
            assert self.config.seconds is not None
            begun, since = self.mark
            left = (self.config.seconds - self._seconds()) * USABLE
            self.state.horizon = self._agreed(done + max(1, int(left * (done - begun) / (now - since))))
        self.mark = (done, now)

    def _agreed(self, value: Any) -> Any:
        """What the first process says, for all."""
        if self.accelerator.num_processes == 1:
            return value
        return broadcast_object_list([value])[0]

    def _seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def _report(self, window: Window) -> None:
        figures = window.figures(self.accelerator.num_processes)
        self._refuse_no_number(figures)
        figures["learning_rate"] = self.rate
        self._tell("train", figures)
        late = self.config.seconds is not None and self._seconds() > self.config.seconds
        if self._agreed(late) and self.state.horizon is not None and self.state.done < self.state.horizon:
            self.state.horizon = self.state.done
            self._tell("note", note="the time is over before the planned number of steps: training ends here")

    def _refuse_no_number(self, figures: Mapping[str, Any]) -> None:
        if not math.isfinite(figures["loss"]):
            raise NumericsError(
                f"the loss became {figures['loss']} by step {self.state.done}: lower the learning rate and begin anew "
                "in another folder"
            )

    def _tell(self, event: str, figures: Mapping[str, Any] | None = None, note: str = "") -> None:
        report = Report(event, self.state.done, self.state.horizon, self._seconds(), figures or {}, note)
        self.state.curve.append(asdict(report))
        if self.accelerator.is_main_process:
            self.progress(report)

    def _held_out_batches(self, skip: int, every: int) -> Iterator[tuple[Batch, Features]]:
        left = self.config.evaluation_tokens
        for batch in self.held_out.batches(self.config.batch_tokens, self.config.seed, skip, every):
            if left <= 0:
                return
            left -= batch.tokens.numel() * every
            moved = batch.to(self.device)
            yield moved, self.harvester(moved)

    def _evaluate(self) -> dict[str, Any]:
        """Loss and rates on held-out text, by all processes together.

        Gradients stay on, and are not asked for: compiled functions would be compiled again without them.
        """
        self.model.eval()
        losses, total = [], None
        for batch, features in self._held_out_batches(self.accelerator.process_index, self.accelerator.num_processes):
            loss, counts = self.model(batch, features)
            losses.append(loss.detach())
            total = counts if total is None else total + counts
        self.model.train()
        assert total is not None
        loss = self.accelerator.reduce(torch.stack(losses).mean(), "mean")
        return {"loss": loss.item(), **total.gathered(self.accelerator.reduce).figures()}

    def _ask(self) -> None:
        """Figures that need the engine, from whoever composed training with it; their time is not training's."""
        asked = time.monotonic()
        if self.measure is not None and self.accelerator.is_main_process:
            self._tell("measured", self.measure(self._trained({})))
        self.accelerator.wait_for_everyone()
        self.began += time.monotonic() - asked

    def _is_due(self) -> bool:
        return bool(self._agreed(time.monotonic() - self.saved > self.config.checkpoint_seconds))

    def _save(self) -> None:
        self.state.seconds = self._seconds()
        self.checkpoints.save()
        self.saved = time.monotonic()

    def _finish(self) -> Trained:
        held_out = self._evaluate()
        self._refuse_no_number(held_out)
        self._tell("held_out", held_out)
        self.bare.settle(self._held_out_batches(0, 1))
        self._save()
        return self._trained(held_out)

    def _trained(self, held_out: Mapping[str, Any]) -> Trained:
        figures = {
            "held_out": dict(held_out),
            "coverage": self.vocabulary.coverage,
            "parameters": sum(parameter.numel() for parameter in self.bare.parameters()),
            "steps": self.state.done,
            "tokens": self.state.tokens,
            "epochs": self.state.epoch + 1,
            "seconds": round(self._seconds(), 1),
        }
        return Trained(self.drafter, self.bare.settings(), self.bare.tensors(), figures, list(self.state.curve))

    def _identity(self, settings: Mapping[str, Any], initial: Mapping[str, Tensor] | None) -> dict[str, Any]:
        """Everything that decides which weights come out."""
        config = {name: value for name, value in asdict(self.config).items() if name not in _FREE_TO_CHANGE}
        made = {
            "target": fingerprint(self.harvester.module.parameters()),
            "corpus": blake2b(self.corpus.tokens.tobytes(), digest_size=8).hexdigest(),
            "start_from": None if initial is None else fingerprint(initial[name] for name in sorted(initial)),
        }
        return {"drafter": self.drafter, **config, **made, "shape": dict(settings)}
