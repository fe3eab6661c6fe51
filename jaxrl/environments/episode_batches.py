"""The environments of a role that samples: what the engine asks of them, batch by batch."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from jaxrl.checkpoint import store
from jaxrl.config.paths import without_folders
from jaxrl.config.schema import Config
from jaxrl.data.chat_template import has_template, holds_turns
from jaxrl.data.example import JsonObject, Message, Split
from jaxrl.data.tokenizer import (
    Tokenizer,
    TurnEncoder,
    as_messages,
    chat_of,
    encode_prompt,
    roles_of,
)
from jaxrl.environments.environment_pool import EnvironmentPool
from jaxrl.environments.environment_process import (
    KEY,
    EnvironmentFacts,
    Observation,
    Prompted,
    Session,
    find,
)
from jaxrl.errors import RunError, UserError, shown
from jaxrl.process import atomic_files
from jaxrl.process.streams import to_stderr
from jaxrl.process.user_code import Failure, too_many_failures
from jaxrl.process.waiting import waiting
from jaxrl.sampling.partial_completion import Reply
from jaxrl.types import Prompt, TemplateInputs

MOST_WORKERS = 16
"""Processes where `environment.workers` is null, on a machine with many cores."""
PROMPT = -1
"""Turn that stands for what `reset` returned, in records."""
FOLDER = "episodes"
PACKED = ".gz"
"""Ends the name of a record that no resumed run adds to."""
_NAME = re.compile(r"(train|eval)-(\d+)\.jsonl(\.gz)?")

Place = tuple[int, ...]
"""Of an answer in the batches of a step: attempt, id of the prompt, sample, turn."""
FACTS: Place = (PROMPT,) * 4
"""Stands for what the run knows of the environment."""


class Episodes:
    """The environments of one role; its processes start at once, beside the run's own start."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        run_dir: Path | None = None,
        notify: Callable[[str], None] = to_stderr,
        given: Mapping[str, bytes] = MappingProxyType({}),
        asks: bool = True,
    ):
        """
        Args:
            config: with an `environment.name`.
            given: as in `environment_process.find`.
            run_dir: where answers are recorded; None: nowhere, so that a run which is killed asks
                its environments again.
            notify: gets messages for the user.
            asks: whether what is not recorded is asked for. Else there are no processes, and the
                records of `run_dir` stay as they are.

        Raises:
            UserError: there is no such environment; `pool.facts` says whether it can be loaded.
        """
        e = config.environment
        self.config, self.environment, self.tokenizer = config, e, tokenizer
        self.run_dir, self.notify, self.asks = run_dir, notify, asks
        self.turns = TurnEncoder(tokenizer, notify)
        self.chats = has_template(tokenizer) and config.data.chat == "auto"
        """Whether texts that an environment begins with become messages of the user."""
        most = config.batch_size * config.group_size
        workers = e.workers or min(2 * (os.cpu_count() or 1), MOST_WORKERS, most)
        self.pool = pool_of(config, workers if asks else 0, given)
        self.source = self.pool.source
        self._batches = itertools.count()
        self._looked = False
        """Whether the prompts were searched for the tools."""
        self._last: EpisodeBatch | None = None
        self._packing: Future[None] | None = None

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        step: int,
        attempt: int = 0,
        split: Split = "train",
        most: int | None = None,
    ) -> tuple[list[Prompt], EpisodeBatch]:
        """Begins n episodes of each prompt, and gives up those of the batch before but where
        batches are streamed.

        Args:
            step, attempt, split: of the batch: with a prompt's id they name its records.
            most: tokens of the longest episode; None: `max_new_tokens`.

        Returns:
            The prompts, with the tokens that episodes begin with (those of `reset`, where the
            environment has one, and with its tools), and the episodes.

        Raises:
            UserError: a prompt of the environment is longer than `max_prompt_tokens`; or what the
                batch needs is neither recorded nor asked for.
            RunError: more of its resets fail than `environment.max_failures` allows.
        """
        if self._last is not None and not self.config.streams:
            self._last.give_up()
        run_dir, most = self.run_dir, most or self.config.max_new_tokens
        journal = None if run_dir is None else Journal(run_dir, split, step, self.notify, self.asks)
        if run_dir is not None and self.asks and (self._packing is None or self._packing.done()):
            self._packing = self.pool.submit(asyncio.to_thread(pack_records, run_dir))
        number = (next(self._batches), attempt)
        self._last = batch = EpisodeBatch(self, prompts, n, most, number, journal)
        facts = batch.facts()
        if facts.resets:
            batch.reset()
        own = facts.tools
        batch.inputs = [replace(p.inputs, tools=(*p.inputs.tools, *own)) for p in prompts]
        begun = [self._encoded(p, batch.firsts.get(i), facts) for i, p in enumerate(prompts)]
        if facts.tools and not self._looked:
            self._looked = True
            chat, bare = chat_of(begun[0]), prompts[0].inputs
            if chat is None or encode_prompt(self.tokenizer, chat, bare) == begun[0].tokens:
                why = "text prompts have" if chat is None else "the chat template has"
                self.notify(
                    f"{KEY}: {self.source.text}: the model does not see its tools: {why} no place"
                    " for them; say in the prompts what can be called, and how"
                )
        return begun, batch

    def in_turn(self, text: str) -> bool:
        """Returns whether a text that an environment begins with becomes a message of the user."""
        return self.chats and not holds_turns(self.tokenizer, text)

    def close(self) -> None:
        self.pool.close()

    def _encoded(self, prompt: Prompt, first: Prompted | None, facts: EnvironmentFacts) -> Prompt:
        """Returns the prompt as the environment begins it."""
        if first == own_prompt(prompt):
            first = None
        conversational = prompt.conversational if first is None else not isinstance(first, str)
        if isinstance(first, str) and self.in_turn(first):
            first = ({"role": "user", "content": first},)
        messages = chat_of(prompt) if first is None else as_messages(first)
        if first is None and not (facts.tools and messages):
            return prompt
        given: str | Sequence[Message] = messages if messages is not None else str(first)
        try:
            inputs = replace(prompt.inputs, tools=(*prompt.inputs.tools, *facts.tools))
            tokens = encode_prompt(self.tokenizer, given, inputs)
        except UserError as error:
            raise UserError(f"{KEY}: {self.source.text}, prompt {prompt.id}: {error}") from error
        most = self.config.max_prompt_tokens
        if len(tokens) > most:
            raise UserError(
                f"{KEY}: {self.source.text}: its prompt for {prompt.text[:60]!r} (prompt"
                f" {prompt.id}) has {len(tokens)} tokens, max_prompt_tokens={most} are allowed:"
                " raise it, or let the environment say less"
            )
        columns = dict(prompt.columns)
        columns.pop("messages", None)
        text = str(first)
        if messages is not None:
            columns["messages"], text = tuple(messages), messages[-1]["content"]
        return replace(
            prompt, tokens=tokens, text=text, columns=columns, conversational=conversational
        )


@dataclass
class Episode:
    """One episode; an `EnvironmentClient`."""

    batch: EpisodeBatch
    prompt: int  # index in the batch
    sample: int
    place: tuple[int, int, int]  # that of its answers, but for the turn
    session: Session
    chain: str  # digest of the environment and of all turns so far
    turn: int = 0  # turns of the model that were answered
    replaying: bool = True  # whether the records may still have its next answer

    def answer(self, text: str, *, eos: int | None, length: int) -> Future[Reply]:
        return self.batch.pool.submit(self.batch.answer(self, text, eos, length))

    def end(self) -> None:
        self.batch.pool.submit(self.batch.pool.end(self.session))

    def again(self) -> Episode:
        self.end()
        return self.batch.begin_again(self)


def pool_of(
    config: Config, workers: int, given: Mapping[str, bytes] = MappingProxyType({})
) -> EnvironmentPool:
    """Starts processes that load the environment of a config.

    Args:
        given: as in `environment_process.find`.

    Raises:
        UserError: there is no such environment.
    """
    e = config.environment
    assert e.name is not None
    return EnvironmentPool(
        find(e.name, e.arguments, given),
        workers=workers,
        timeout=e.timeout,
        startup=config.deadlines.startup,
        memory_mb=e.memory_mb,
        max_processes=e.max_processes,
    )


class EpisodeBatch:
    """The episodes of one batch."""

    def __init__(
        self,
        episodes: Episodes,
        prompts: Sequence[Prompt],
        n: int,
        most: int,  # tokens of the longest episode
        name: tuple[int, int],  # number of the batch in this process, and attempt
        journal: Journal | None,
    ):
        self._all, self._prompts, self._n, self._most = episodes, prompts, n, most
        self.pool = episodes.pool
        (self._number, self._attempt), self._journal = name, journal
        self.inputs: list[TemplateInputs] = []  # of the chat template, for each prompt
        self.firsts: dict[int, Prompted] = {}  # what `reset` returned, by the prompt's index
        self._recorded: set[int] = set()  # the prompts for which an earlier process recorded that
        self._failures: dict[tuple[int, int], Failure] = {}
        self._chat = [chat_of(prompt) is not None for prompt in prompts]
        self._episodes: dict[tuple[int, int], Episode] = {}

    def facts(self) -> EnvironmentFacts:
        """Asks what the environment is, and records it."""
        journal = self._journal
        if journal is None:
            return self.pool.facts()
        record = journal.read.get(FACTS)
        if not journal.asks:
            if record is None:
                raise journal.lacks("what the environment offers")
            return EnvironmentFacts(record["resets"], record["tools"])
        facts = self.pool.facts()
        known = {"chain": "", "resets": facts.resets, "tools": list(facts.tools)}
        if record != known:
            self.pool.submit(journal.add(FACTS, known)).result()
        return facts

    def reset(self) -> None:
        """Asks for the prompts; waits for all of them."""
        asked = [self.pool.submit(self._reset(index)) for index in range(len(self._prompts))]
        with waiting(f"{self._all.source.text}: the prompts of {len(asked)} episodes"):
            firsts = [future.result() for future in asked]
        self.firsts = dict(enumerate(firsts))
        for index, first in self.firsts.items():
            if first != own_prompt(self._prompts[index]):
                self._chat[index] = not isinstance(first, str) or self._all.in_turn(first)

    def give_up(self) -> None:
        """Ends the episodes that the engine did not end."""
        for episode in self._episodes.values():
            episode.end()

    async def _reset(self, index: int) -> Prompted:
        """Returns the prompt of a row, by the instance of its first episode."""
        episode = self.episode(index, 0)
        record = self._record(episode, PROMPT)
        if record is not None:
            first = record["first"]
            self._recorded.add(index)
            return first if isinstance(first, str) else tuple(first)
        result = await self.pool.begin(episode.session)
        if isinstance(result, Failure):
            prompt = self._prompts[index]
            raise RunError(
                f"{KEY}: {self._all.source.text} has no prompt for {prompt.text[:60]!r} (prompt"
                f" {prompt.id}); {result.kind}: {result.text}"
            )
        await self._write(episode, PROMPT, {"first": result})
        return result

    async def answer(self, episode: Episode, text: str, eos: int | None, length: int) -> Reply:
        """Answers a turn of an episode; arguments as of `EnvironmentClient.answer`."""
        prompt = episode.prompt
        episode.session.first = self.firsts.get(prompt)
        episode.session.strict &= prompt not in self._recorded
        turn, episode.turn = episode.turn, episode.turn + 1
        episode.chain = _digest(episode.chain, text)
        result = await self._observe(episode, turn, text)
        if isinstance(result, Failure):
            return self._failed(episode, result)
        said = "\n".join(message["content"] for message in result.messages)
        if result.done:
            return Reply(text=said, reward=result.reward)
        chat, roles = self._chat[prompt], roles_of(result.messages)
        try:
            inputs = self.inputs[prompt]
            tokens = self._all.turns.after(result.messages, eos=eos, chat=chat, inputs=inputs)
        except UserError as error:
            raise UserError(f"{KEY}: {self._all.source.text} answers with {error}") from error
        last = episode.turn == self._all.environment.max_turns
        if last or length + len(tokens) >= self._most:
            return Reply(text=said, reward=result.reward, cut=True, roles=roles)
        if not tokens:
            text = f"{self._all.source.text}: its answer has no tokens"
            return self._failed(episode, Failure("exception", text))
        return Reply(tokens, said, result.reward, roles=roles)

    async def _observe(self, episode: Episode, turn: int, text: str) -> Observation | Failure:
        """Returns the recorded answer, or else that of the environment, which is then recorded."""
        record = self._record(episode, turn, text)
        if record is not None and "failure" in record:
            return Failure(*record["failure"])
        if record is not None:
            observation = Observation.of_json(record)
            episode.session.turns.append((text, observation))
            episode.session.strict = False
            return observation
        result = await self.pool.step(episode.session, text)
        content = asdict(result)
        if isinstance(result, Failure):
            content = {"failure": [result.kind, result.text]}
        await self._write(episode, turn, content)
        return result

    def _record(self, episode: Episode, turn: int, text: str = "") -> JsonObject | None:
        """Finds the record of an earlier process; None from the first turn on that it did not
        see. Raises UserError or RunError where that must not be."""
        journal = self._journal
        if journal is None or not episode.replaying:
            return None
        record = journal.read.get((*episode.place, turn))
        if record is not None and record["chain"] == episode.chain:
            return record
        if not journal.asks:
            what = "the prompt" if turn == PROMPT else f"turn {turn + 1}"
            what += f" of sample {episode.sample} of prompt {episode.place[1]}"
            raise journal.lacks(what) if record is None else journal.differs(what, text)
        episode.replaying = turn == PROMPT
        return None

    async def _write(self, episode: Episode, turn: int, content: JsonObject) -> None:
        if self._journal is not None:
            await self._journal.add((*episode.place, turn), {"chain": episode.chain, **content})

    def _failed(self, episode: Episode, failure: Failure) -> Reply:
        """Returns the reply about an episode that failed; raises RunError where that is one too
        many."""
        failures, allowed = self._failures, self._all.environment.max_failures
        failures[episode.prompt, episode.sample] = failure
        total = len(self._prompts) * self._n
        if len(failures) > allowed * total:
            if self._journal is not None:
                self._journal.forget_failures()
            who, limit = f"{KEY}: {self._all.source.text}", f"environment.max_failures={allowed:g}"
            raise too_many_failures(failures.values(), who, f"{total} episodes", limit)
        return Reply(failure=f"{failure.kind}: {failure.text}")

    def episode(self, prompt: int, sample: int) -> Episode:
        """Returns an episode, by the index of its prompt in the batch and the number among those of
        that prompt."""
        if (prompt, sample) not in self._episodes:
            row, source = row_of(self._prompts[prompt]), self._all.source
            what = without_folders([source.text, dict(source.arguments)])
            known = json.dumps([row, what], sort_keys=True, default=repr)
            self._episodes[prompt, sample] = Episode(
                self,
                prompt,
                sample,
                (self._attempt, self._prompts[prompt].id, sample),
                Session((self._number, prompt, sample), row),
                _digest(source.digest, known),
            )
        return self._episodes[prompt, sample]

    def begin_again(self, episode: Episode) -> Episode:
        """Returns the same episode from its beginning, of another instance."""
        place = episode.prompt, episode.sample
        del self._episodes[place]
        made = self.episode(*place)
        made.session.key = self._number, *place, "again"
        return made


class Journal:
    """The answers of environments in the batches of one step, on disk, a line of JSON for each.

    A resumed run samples a batch again with the same bits, and so writes the same turns, as long as
    the environments answer as they did: also those that draw random numbers, or look at the world.
    So does a replay, which asks none of them.
    """

    def __init__(
        self,
        run_dir: Path,
        split: Split,
        step: int,
        notify: Callable[[str], None],
        asks: bool = True,
    ):
        """Reads what an earlier process recorded, to which it adds if it `asks`."""
        self.path, self._notify = run_dir / FOLDER / f"{split}-{step}.jsonl", notify
        self.asks = asks
        self._when = f"step {step + 1}" if split == "train" else f"the evaluation after step {step}"
        self._when += f" of {run_dir}"
        self.read: dict[Place, JsonObject] = {}
        """What it recorded; of two records of one place, the later."""
        self._waiting: list[str] = []
        self._writing = asyncio.Lock()
        self._forgets = self._refused = False
        for record in self._records():
            self.read[tuple(record.pop("place"))] = record

    def lacks(self, what: str) -> UserError:
        """Makes the error of what is not recorded."""
        return UserError(
            f"{self._when} cannot be replayed: {self.path} has no line for {what}: an older jaxrl"
            " removed it, it was cut or damaged since, or the episode ended there in the run"
        )

    def differs(self, what: str, text: str) -> RunError:
        """Makes the error of a turn that is not the one whose answer is recorded."""
        return RunError(
            f"{self._when} differs: {what} is not the one that the environment answered then."
            f" Replayed, it is {shown(text)}"
        )

    async def add(self, place: Place, record: JsonObject) -> None:
        """Writes an answer; in the file when this returns. A disk that refuses it is reported, and
        stops no run."""
        if self._forgets and "failure" in record:
            return
        self._waiting.append(json.dumps({"place": place, **record}) + "\n")
        async with self._writing:  # what comes while another is written is written at once
            lines, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._write, "".join(lines))
            except OSError as error:
                if not self._refused:
                    self._notify(
                        f"{self.path} cannot be written: {error.strerror}; a run that is killed now"
                        " asks its environments again, and none of it is replayed"
                    )
                self._refused = True

    def forget_failures(self) -> None:
        """Leaves none of the batch's failures, so that a run that ended because of them asks its
        environments again once it is resumed."""
        self._forgets = True
        kept = [record for record in self._records() if "failure" not in record]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        with suppress(OSError):
            atomic_files.put_file(self.path, lambda file: file.write_text(text))

    def _write(self, lines: str) -> None:
        self.path.parent.mkdir(exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(lines)

    def _records(self) -> list[JsonObject]:
        """Returns the whole lines of the file, if there is one; ends a line that a killed process
        did not end."""
        records, content = [], _packed(self.path)
        with suppress(OSError):
            content += self.path.read_bytes()
        for line in content.splitlines():
            with suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                if {*map(type, record["place"])} == {int} and "chain" in record:
                    records.append(record)
        if self.asks and content and not content.endswith(b"\n"):
            with suppress(OSError):
                self._write("\n")
        return records


def pack_records(run_dir: Path) -> None:
    """Compresses the records of batches from before the newest checkpoint: no resumed run samples
    these again, a replay does."""
    with suppress(UserError, OSError):  # a disk that does not answer: later
        newest = next(iter(store.folders(run_dir)), None)
        for path in (run_dir / FOLDER).glob("*.jsonl"):
            name = _NAME.fullmatch(path.name)
            if newest is not None and name and int(name[2]) < int(newest.name):
                content = gzip.compress(_packed(path) + path.read_bytes())
                write = partial(Path.write_bytes, data=content)
                atomic_files.put_file(path.with_name(path.name + PACKED), write)
                path.unlink()


def _packed(path: Path) -> bytes:
    """Reads the packed records of a file; none where there are none."""
    with suppress(OSError, EOFError, zlib.error):
        return gzip.decompress(path.with_name(path.name + PACKED).read_bytes()) + b"\n"
    return b""


def copy_records(run_dir: Path, to: Path, step: int) -> None:
    """Copies the records of the batches that the weights after `step` batches, and later ones,
    sampled."""
    for path in (run_dir / FOLDER).glob("*.jsonl*"):
        name = _NAME.fullmatch(path.name)
        if name and int(name[2]) >= step:
            (to / FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(path, to / FOLDER / path.name)


def row_of(prompt: Prompt) -> JsonObject:
    """Makes the row that `Environment.reset` gets of a prompt."""
    chat = chat_of(prompt)
    columns = {key: value for key, value in prompt.columns.items() if key != "messages"}
    turns = {} if chat is None else {"messages": [dict(message) for message in chat]}
    value = prompt.answer if prompt.answer_value is None else prompt.answer_value
    answer = {"answer": value} if value is not None or "answer" not in columns else {}
    return {**columns, **turns, "prompt": prompt.text, **answer}


def own_prompt(prompt: Prompt) -> Prompted:
    """Makes the result of a `reset` that has no prompt of its own."""
    chat = chat_of(prompt)
    return prompt.text if chat is None else tuple(dict(message) for message in chat)


def _digest(*parts: str) -> str:
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()[:16]
