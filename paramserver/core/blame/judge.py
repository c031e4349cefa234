"""The state machine that decides which steps waited noticeably, for whom, and why.

First the wait that everybody sees is measured, by the clock of one server. Then follows who was waited for: the worker
whose contribution came last, or the server. Only then the cause, from what that process says of its own time. No two
clocks are compared.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from paramserver.core.blame.bound import AtBound
from paramserver.core.blame.causes import SHARE, Cause, Finding, of_server, of_worker
from paramserver.core.blame.facts import Blamed, Held, Made, Worked
from paramserver.core.blame.sentences import of_many
from paramserver.core.blame.spent import Spent, total, usual

# A wait is noticeable from so many seconds on, and from this part of the usual time of a step on.
NOTICED_S, NOTICED_SHARE = 0.25, 0.5
# The report of a worker follows that of a server by at most a second, unless it is still at work on the step.
RIPE_S, LATE_S = 1.2, 4.0
# The first steps of a timeline are not judged: processes begin at different times.
OPENING = 2
WORST = 10
# "Usual" is the median over so many steps.
_RECENT = 64
# A member is said to hold up most steps from this part of so many steps on, if that takes this part of their time.
_MANY, _LEAST_MANY = 32, 8
_MOST, _SHARE, _LEAST_S = 0.7, 0.3, 0.5
# A worker that waits for less than this part of the wait for it has found the version there.
_LATE = 0.1
# Of so many other workers, so many records say what is usual.
_OTHERS, _RECORDS = 16, 8
# So many steps and waits at the bound are yet to be judged at most.
_WAITING = 10_000

Records = Callable[[int], Sequence[Worked]]


@dataclass(slots=True)
class _Pending:
    """A step of which some shards have told: those on which a worker, and the server, were waited for longest."""

    heard_at: float
    straggled: Made
    served: Made


class Judge:
    """Hears of steps, and judges each a little later, when the reports of workers have come, too."""

    def __init__(self) -> None:
        # The steps that waited longest, the longest first.
        self.worst: list[Blamed] = []
        self.newest: Blamed | None = None
        # In words: who holds up most of the last steps; empty: nobody.
        self.chronic = ""
        # How many steps were judged, and how long they waited for workers in all.
        self.steps, self.waited = 0, 0.0
        self._pending: dict[int, _Pending] = {}
        self._holds: dict[tuple[int, int], tuple[float, Held]] = {}
        self._first: int | None = None
        self._usual: deque[float] = deque(maxlen=_RECENT)
        self._making: dict[int, deque[float]] = {}
        self._servers: dict[int, str] = {}
        self._many: deque[tuple[Made, Made]] = deque(maxlen=_MANY)
        self._bound = AtBound()
        self._looked_at = 0.0

    # ---- facts

    def anew(self) -> None:
        """Another timeline begins: steps that are not judged never will be."""
        self._pending.clear()
        self._holds.clear()
        self._many.clear()
        self._bound = AtBound()
        self._first, self.chronic = None, ""

    def made(self, made: Made, now: float) -> None:
        """A shard tells of a version."""
        self._first = made.step if self._first is None else min(self._first, made.step)
        self._servers[made.shard] = made.server
        if made.step >= self._first + OPENING:
            pending = self._pending.get(made.step)
            if pending is None:
                if len(self._pending) >= _WAITING:
                    del self._pending[next(iter(self._pending))]
                self._pending[made.step] = _Pending(now, made, made)
            else:
                pending.straggled = max(pending.straggled, made, key=lambda one: one.straggled)
                pending.served = max(pending.served, made, key=self._served)
        if not made.asynchronous:
            self._usual.append(made.published - made.straggled)
        self._making.setdefault(made.shard, deque(maxlen=_RECENT)).append(made.making)

    def held(self, held: Held, now: float) -> None:
        """A shard tells of a worker that was held at the bound."""
        if held.clock < OPENING:
            return
        key = held.by, held.clock
        if key not in self._holds and len(self._holds) >= _WAITING:
            del self._holds[next(iter(self._holds))]
        since, longest = self._holds.get(key, (now, held))
        self._holds[key] = since, max(longest, held, key=lambda one: one.seconds)

    # ---- usual times

    @property
    def usual_s(self) -> float:
        """How long a step usually takes, without the wait for its last worker; 0: not known yet."""
        return median(self._usual) if len(self._usual) > OPENING else 0.0

    def noticed(self, waited: float, asynchronous: bool = False) -> bool:
        """Whether people would notice the wait: it is long, also in relation to a step."""
        known = asynchronous or self.usual_s > 0
        return known and waited >= max(NOTICED_S, NOTICED_SHARE * self.usual_s)

    def _served(self, made: Made) -> float:
        """For so long all workers waited for the server itself, beyond what is usual."""
        own = self._servers[made.shard]
        others = [times for shard, times in self._making.items() if self._servers[shard] != own]
        times = others or [one for shard, one in self._making.items() if shard == made.shard]
        making = max(0.0, made.making - min((median(one) for one in times), default=0.0))
        if made.asynchronous:
            return max(making, made.paused)
        return max(making, min(made.paused, made.published - self.usual_s))

    # ---- judgement

    def look(self, now: float, names: Mapping[int, str], records: Records) -> list[Blamed]:
        """Judge the steps whose time has come; returns those that waited noticeably.

        ``names``: of the workers, by number. ``records``: the last records of a worker, the oldest first.
        """
        found: list[Blamed] = []
        evidence = _Evidence(names, records)
        for step, pending in list(self._pending.items()):
            age, late = now - pending.heard_at, pending.straggled
            silent = self.noticed(late.straggled) and late.culprit in names and not evidence.told(late)
            if age < (LATE_S if silent else RIPE_S):
                continue
            del self._pending[step]
            self._many.append((pending.straggled, pending.served))
            self.steps += 1
            self.waited += pending.straggled.straggled
            if (blamed := self._judge(pending, evidence, now)) is not None:
                found.append(blamed)
        for key, (since, held) in list(self._holds.items()):
            known = held.by in names
            silent = known and held.seconds >= NOTICED_S and not evidence.told_clock(held.by, held.clock)
            if now - since < (LATE_S if silent else RIPE_S):
                continue
            del self._holds[key]
            self.waited += held.seconds
            if not known:
                continue
            blamed = _judge_held(held, evidence, now)
            self._bound.add(blamed)
            if held.seconds >= max(NOTICED_S, NOTICED_SHARE * evidence.usual_slice(held.by)):
                found.append(blamed)
        for blamed in found:
            self.newest = blamed
            self.worst = sorted([*self.worst, blamed], key=lambda one: -one.waited)[:WORST]
        if now - self._looked_at >= 1.0:
            self._looked_at = now
            self.chronic = self._chronic(evidence) or self._bound.chronic(now)
        return found

    def _judge(self, pending: _Pending, evidence: _Evidence, now: float) -> Blamed | None:
        late, slow = pending.straggled, pending.served
        served = self._served(slow)
        if served > late.straggled:
            if not self.noticed(served, slow.asynchronous):
                return None
            if slow.asynchronous and not evidence.waited_for_servers(served):
                return None
            finding = of_server(served, slow.starved, slow.paused)
            return Blamed(slow.step, served, slow.server, finding.cause, finding.seconds, at=now)
        if not self.noticed(late.straggled):
            return None
        if late.culprit is None or late.culprit not in evidence.names:
            return Blamed(late.step, late.straggled, "", Cause.UNKNOWN, 0.0, late.lo, late.hi, at=now)
        waited = late.straggled - evidence.larger_share(late.culprit, [late.step])
        if not self.noticed(waited):
            return None
        finding = evidence.why(waited, late.culprit, [late], [made for made, _ in self._many])
        name = evidence.names[late.culprit]
        return Blamed(late.step, late.straggled, name, finding.cause, finding.seconds, late.lo, late.hi, at=now)

    def _chronic(self, evidence: _Evidence) -> str:
        """The worker that holds up most of the last steps, in words."""
        of = len(self._many)
        if of < _LEAST_MANY:
            return ""
        least = max(_LEAST_S, _SHARE * sum(made.published for made, _ in self._many))
        worker, times = Counter(made.culprit for made, _ in self._many).most_common(1)[0]
        if worker is not None and worker in evidence.names and times >= _MOST * of:
            late = [made for made, _ in self._many if made.culprit == worker]
            waits = [made.straggled for made in late]
            waited = sum(waits) - evidence.larger_share(worker, [made.step for made in late])
            if waited - max(waits) >= least:  # a single long wait is not most of the steps
                finding = evidence.why(waited, worker, late, [made for made, _ in self._many])
                if finding.cause not in (Cause.UNKNOWN, Cause.JOINED):
                    whole = sum(made.published for made in late)
                    return of_many(evidence.names[worker], finding, times, of, waited / whole)
        for server in {made.server for _, made in self._many}:
            slow = [made for _, made in self._many if made.server == server and self._served(made) > 0]
            waits = [self._served(made) for made in slow]
            served = sum(waits)
            # The time of an asynchronous step is that of a slice.
            busy = sum(evidence.usual_busy for made in slow if made.asynchronous)
            if len(slow) >= _MOST * of and served - max(waits) >= max(least, _SHARE * busy):
                finding = of_server(served, sum(m.starved for m in slow), sum(m.paused for m in slow))
                whole = sum(made.published for made in slow) + busy
                return of_many(server, finding, len(slow), of, served / whole)
        return ""


def _judge_held(held: Held, evidence: _Evidence, now: float) -> Blamed:
    mine = evidence.at_clock(held.by, held.clock)
    finding = Finding(Cause.UNKNOWN)
    if mine is not None:
        usual_ = evidence.usual(held.by)
        # The slowest worker is never held at the bound: its waits are those for messages.
        link = mine.spent.send + mine.spent.wait - usual_.send
        finding = of_worker(held.seconds, mine.spent, usual_, link, mine.first)
    name = evidence.names[held.by]
    return Blamed(held.clock, held.seconds, name, finding.cause, finding.seconds, asynchronous=True, at=now)


class _Evidence:
    """The times that workers report; the report of a worker is read at most once per look."""

    def __init__(self, names: Mapping[int, str], records: Records) -> None:
        self.names = names
        self._records = records
        self._read: dict[int, Sequence[Worked]] = {}

    def of(self, worker: int) -> Sequence[Worked]:
        """The last records of a worker."""
        if worker not in self._read:
            self._read[worker] = self._records(worker)
        return self._read[worker]

    def at(self, worker: int, step: int) -> list[Worked]:
        """The slices that a worker has handed in for a step."""
        return [record for record in self.of(worker) if record.step == step and record.done]

    def at_clock(self, worker: int, clock: int) -> Worked | None:
        """Asynchronous: the time for which a worker was at this clock, until its contribution had counted."""
        records = self.of(worker)
        places = [place for place, record in enumerate(records) if record.step == clock]
        if not places:
            return None
        # The record of a slice begins when the former slice is handed in, and not when that one has counted.
        after = next((record.spent.send for record in records[places[-1] + 1 :] if record.step == clock + 1), 0.0)
        record = records[places[-1]]
        return replace(record, spent=replace(record.spent, send=after))

    def told_clock(self, worker: int, clock: int) -> bool:
        """Whether the worker has told of its slice at this clock, and what came after it."""
        return any(record.step == clock and record.done for record in self.of(worker)[:-1])

    def about(self, worker: int, step: int, waited: float) -> list[Worked]:
        """The slices of a worker that made it late for a step by so many seconds; empty if it has not told yet."""
        records = self.of(worker)
        own = [place for place, record in enumerate(records) if record.step == step]
        if own:
            begun = records[own[0]].spent
            # A worker that finds the version there has begun the step late: the former slice took long.
            late = own[0] > 0 and begun.wait + begun.send < _LATE * waited
            return [records[place] for place in ([own[0] - 1] if late else []) + own]
        for place, record in enumerate(records):
            after = records[place + 1] if place + 1 < len(records) else None
            # It was at work on a former step all the time, and others have done its share of this one.
            if record.step < step and (after.step > step if after is not None else not record.done):
                return [record]
        return []

    def told(self, late: Made) -> bool:
        """Whether the worker that the step waited for has told of its last slice there."""
        found = self.about(late.culprit, late.step, late.straggled) if late.culprit is not None else []
        return bool(found) and all(record.done for record in found)

    def _others(self, worker: int) -> list[int]:
        return [other for other in self.names if other != worker][:_OTHERS]

    def usual(self, worker: int) -> Spent:
        """Where the time of one slice of other workers usually goes; its own, if the others have told nothing."""
        parts = [record.spent for other in self._others(worker) for record in self.of(other)[-_RECORDS:]]
        parts = parts or [record.spent for record in self.of(worker) if record.done]
        return usual(parts) if parts else Spent()

    def usual_slice(self, worker: int) -> float:
        """How long other workers usually are busy with a slice, until it is handed in and has arrived."""
        found = self.usual(worker)
        return found.busy + found.send

    @property
    def usual_busy(self) -> float:
        """How long workers usually are busy with a slice."""
        return median([self.usual(worker).busy for worker in self.names] or [0.0])

    def waited_for_servers(self, seconds: float) -> bool:
        """Asynchronous: whether half of the workers have waited so long for an answer, and longer than usual."""
        waits = [[one.spent.send + one.spent.wait for one in self.of(worker)] for worker in self.names]
        long = sum(max(found, default=0.0) >= SHARE * seconds for found in waits)
        return 2 * long >= len(waits) and seconds >= NOTICED_SHARE * self.usual_busy

    def larger_share(self, worker: int, steps: Collection[int]) -> float:
        """So much longer these steps may take the worker, since it has more slices in them than others.

        The steps before count, too: a worker that has computed the slice of another one there begins late.
        """
        steps = {earlier for step in steps for earlier in (step - 1, step)}
        mine = sum(len(self.at(worker, step)) for step in steps)
        counts = [sum(len(self.at(other, step)) for step in steps) for other in self._others(worker)]
        theirs = median([count for count in counts if count] or [mine])
        return max(0.0, mine - theirs) * self.usual(worker).busy

    def why(self, waited: float, worker: int, late: Sequence[Made], recent: Iterable[Made]) -> Finding:
        """The cause for which these steps waited for the worker, ``waited`` seconds in all."""
        records = [record for made in late for record in self.about(worker, made.step, made.straggled)]
        if not records:
            return Finding(Cause.UNKNOWN)
        lags = [
            lag
            for made in recent
            if made.before is not None and (lag := self._lag(made.before, made.step, made.others)) is not None
        ]
        usual_lag = median(lags) if lags else 0.0
        link = sum(self._link(worker, made, usual_lag) for made in late)
        usual_ = self.usual(worker).times(len(records))
        return of_worker(waited, total(record.spent for record in records), usual_, link, records[-1].first)

    def _link(self, worker: int, made: Made, usual_lag: float) -> float:
        """How much longer than usual the messages of a step took, as far as the worker has waited for them, too."""
        lag = self._lag(worker, made.step, made.last)
        if lag is not None:
            # A server without a core reads late. Meanwhile it has lost its share of what it lost in the whole step.
            lost = made.starved * made.straggled / made.published if made.published else 0.0
            return min(lag - usual_lag, self._waits(worker, made.step)) - lost
        # It has handed in nothing for the step, since it was waiting for a version all the time.
        after = next((record.spent for record in self.of(worker) if record.step >= made.step), Spent())
        return after.send + after.wait + after.receive

    def _waits(self, worker: int, step: int) -> float:
        """For so long the worker has waited for messages before the slices of a step and after them, as it says."""
        records = self.of(worker)
        own = [place for place, record in enumerate(records) if record.step == step]
        if own[-1] + 1 >= len(records) or not records[own[-1] + 1].done:
            return inf
        around = records[own[0]], records[own[-1] + 1]
        return sum(record.spent.send + record.spent.wait for record in around)

    def _lag(self, worker: int, step: int, arrived: float) -> float | None:
        """How long the messages of a step took: from the published version to the contribution, less the work.

        None if the worker has not told of the step. ``arrived``: by the server's clock, since it published the version.
        """
        records = self.at(worker, step)
        if not records:
            return None
        # The first slice begins with the wait for the version. Later ones begin when the former one is handed in.
        return arrived - records[0].spent.busy - sum(record.spent.all for record in records[1:])
