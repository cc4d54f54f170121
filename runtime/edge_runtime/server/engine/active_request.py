"""A request that runs on a session: turns decoding rounds into stream events."""

from __future__ import annotations

from dataclasses import replace

from edge_devices.energy.live import RunEnergy, Share, SharedWatch
from edge_runtime.decoding.acceptance_rules import DEFAULT_ACCEPTANCE
from edge_runtime.decoding.loop import Round
from edge_runtime.server.engine.jobs import Finished, Job, Output, Started
from edge_runtime.server.engine.output_parser import OutputParser, TextParser, merged
from edge_runtime.server.requests.messages import Conversation
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.channels import ChannelParser, Event
from edge_runtime.text.chat_template import ChatTemplate


class ActiveRequest:
    """One request on the session with the number `slot`."""

    def __init__(self, job: Job, slot: int, session: Session, template: ChatTemplate, watch: SharedWatch | None = None) -> None:
        """Prepares the generation; computes nothing yet. `watch` measures its energy. Raises RequestError as `Session.generate` does."""
        self.job = job
        self.slot = slot
        request = job.request
        self.generation: Generation = session.generate(
            job.ids,
            max_tokens=request.max_tokens or session.target.context,
            sampling=request.sampling,
            # A seed must repeat the answer. Rejection sampling draws depend on the drafts, reused rows may differ in their last bits,
            # and a policy that learned from other requests drafts other lengths: a repeatable request uses none of the three.
            acceptance="match" if request.repeatable else DEFAULT_ACCEPTANCE,
            reuse_prefix=not request.repeatable,
            policy=session.settings.new_policy() if request.repeatable else None,
            constraint=request.constraint,
        )
        self._parser: OutputParser
        if isinstance(request.prompt, Conversation):
            self._parser = ChannelParser(session.vocabulary, (*request.stop, *template.stop))
        else:
            self._parser = TextParser(session.vocabulary, request.stop)
        self._chunk_size = session.settings.chunk_size
        self._pending: list[Event] = []
        self._tokens = self._delivered = 0
        self._watch = watch
        self._energy: RunEnergy | None = None
        self._share: Share | None = watch.begin() if watch else None

    def begin(self) -> None:
        """Delivers the event that the request was accepted."""
        self.job.deliver(Started())

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._parser.stopped_by is not None

    def take(self, one: Round) -> None:
        """Parses a round's tokens; delivers output once `chunk_size` tokens are pending."""
        for token in one.tokens:
            if not self.stopped:
                self._tokens += 1
                self._pending += self._parser.feed(token)
        if self._tokens - self._delivered >= self._chunk_size:
            self._flush()

    def end_energy(self) -> None:
        """Ends the energy measurement. Must be called once per request, however it ended."""
        if self._watch and self._share:
            self._energy = self._watch.end(self._share, self._tokens)
            self._share = None

    def end(self) -> None:
        """Delivers the remaining output and the reason for the end."""
        self._pending += self._parser.finish()
        self._flush()
        stopped = self.stopped or self.generation.finish_reason == "stop"
        self.job.deliver(Finished(reason="stop" if stopped else "length", stats=self._stats(), energy=self._energy))

    def _flush(self) -> None:
        if self._pending:
            self.job.deliver(Output(events=merged(self._pending), stats=self._stats()))
            self._pending.clear()
            self._delivered = self._tokens

    def _stats(self) -> DecodeStats:
        return replace(self.generation.stats, tokens=self._tokens)
