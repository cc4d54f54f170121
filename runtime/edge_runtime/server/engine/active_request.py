"""A request that has a session: its rounds made into news."""

from __future__ import annotations

from edge_devices.energy.live import RunEnergy, Share, SharedWatch
from edge_runtime.decoding.acceptance_rules import DEFAULT_ACCEPTANCE
from edge_runtime.decoding.loop import Round
from edge_runtime.server.engine.jobs import Begun, Ended, Job, Said, figures_of
from edge_runtime.server.engine.output_parser import PlainSpeech, Speech, joined
from edge_runtime.server.requests.messages import Conversation
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session
from edge_runtime.text.channels import ChannelParser, Event
from edge_runtime.text.chat_template import ChatTemplate


class Running:
    """One request on the session with the number `seat`."""

    def __init__(self, job: Job, seat: int, session: Session, template: ChatTemplate, watch: SharedWatch | None = None) -> None:
        """Starts it; nothing is computed yet. `watch` sees its energy. Raises RequestError where `Session.generate` does."""
        self.job = job
        self.seat = seat
        ask = job.ask
        self.generation: Generation = session.generate(
            job.ids,
            max_tokens=ask.max_tokens or session.target.context,
            sampling=ask.sampling,
            # Only so a seed repeats itself: rejection draws as the drafts fall, and rows that others computed may differ in their last bits.
            # And as many drafts as others' rejections leave would make forwards of other sizes.
            acceptance="match" if ask.repeatable else DEFAULT_ACCEPTANCE,
            reuse_prefix=not ask.repeatable,
            policy=session.settings.new_policy() if ask.repeatable else None,
            constraint=ask.constraint,
        )
        self._speech: Speech
        if isinstance(ask.prompt, Conversation):
            self._speech = ChannelParser(session.vocabulary, (*ask.stop, *template.stop))
        else:
            self._speech = PlainSpeech(session.vocabulary, ask.stop)
        self._chunk_size = session.settings.chunk_size
        self._unsaid: list[Event] = []
        self._tokens = self._told = 0
        self._watch = watch
        self._energy: RunEnergy | None = None
        self._share: Share | None = watch.begin() if watch else None

    def begin(self) -> None:
        """Tells that the request was taken."""
        self.job.deliver(Begun())

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._speech.stopped_by is not None

    def take(self, one: Round) -> None:
        """Tells what a round brought, once that is `chunk_size` tokens."""
        for token in one.tokens:
            if not self.stopped:
                self._tokens += 1
                self._unsaid += self._speech.feed(token)
        if self._tokens - self._told >= self._chunk_size:
            self._tell()

    def conclude(self) -> None:
        """It takes no more energy. Must be called once for each that was started, whatever became of it."""
        if self._watch and self._share:
            self._energy = self._watch.end(self._share, self._tokens)
            self._share = None

    def end(self) -> None:
        """Tells the rest, and why it ended."""
        self._unsaid += self._speech.finish()
        self._tell()
        stopped = self.stopped or self.generation.finish_reason == "stop"
        self.job.deliver(
            Ended(finish="stop" if stopped else "length", figures=figures_of(self.generation.stats, self._tokens, self._energy))
        )

    def _tell(self) -> None:
        if self._unsaid:
            self.job.deliver(Said(events=joined(self._unsaid), figures=figures_of(self.generation.stats, self._tokens)))
            self._unsaid.clear()
            self._told = self._tokens
