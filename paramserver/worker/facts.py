"""Facts that a script can ask about its worker and its job, before and after a model is prepared."""

from __future__ import annotations

from paramserver.config import Settings
from paramserver.worker.chosen import device_of
from paramserver.worker.engine import Engine
from paramserver.worker.schedulers.position import SchedulePosition


class Facts:
    """Facts about one worker of a job."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        #: The settings in force: the job's, and this process's own.
        self.settings = settings
        self.engine = engine
        #: The torch.device of this worker: ``training.device``, shared out by rank where a host has several GPUs.
        self.device = device_of(settings.training.device, engine.member.session.rank)
        self._position = SchedulePosition(engine)

    @property
    def rank(self) -> int:
        """This worker's number, from 0, which the coordinator gives.

        >>> ctx.rank
        0
        """
        return self.engine.member.session.rank

    @property
    def world_size(self) -> int:
        """The number of live workers, from the coordinator's last view of the membership. Alone it is 1.

        >>> ctx.world_size
        1
        """
        return max(1, len(self.engine.member.session.view.workers))

    @property
    def is_main(self) -> bool:
        """True on exactly one worker, the main worker: that of rank 0 if it lives. For printing, evaluating and saving.

        It stays the main worker to the end of its script, and no worker takes over then. Another worker takes over if
        the main worker dies, fails or is asked to leave before. The main worker always has slices to compute.

        >>> if ctx.is_main:
        ...     torch.save(model.state_dict(), "model.pt")
        """
        session = self.engine.member.session
        main = session.view.main == session.member
        self.engine.progress.told(main, self.engine.weights.version)
        return main

    @property
    def version(self) -> int:
        """The version of the weights at hand: how many updates the servers had made when this worker pulled them.

        An update is a step in synchronous mode, a slice in asynchronous mode. The number falls if the job goes back.

        >>> ctx.version
        0
        """
        return self.engine.weights.version

    @property
    def went_back(self) -> bool:
        """True if the job went back to a checkpoint, and the script has had no batch, and begun no epoch, since then.

        Also false if other workers have trained the epoch again meanwhile, so that it does not come again.

        What the script computes meanwhile is of weights whose history was undone: it counts for no epoch, and
        ``ctx.epochs`` gives the epochs since the checkpoint again. A script that keeps its own best model, or stops
        early, leaves out the rest of such an epoch. Always false where servers have backups, unless both are lost.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> for epoch in ctx.epochs(2):
        ...     for x, y in loader:
        ...         F.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     if ctx.went_back:
        ...         continue
        ...     torch.save(ctx.state_dict(), "all.pt")
        """
        return self.engine.rollback.aborted or self.engine.rollback.behind

    @property
    def seed(self) -> int:
        """``training.seed``, the same on all workers. For generators whose numbers all workers share.

        >>> order = torch.randperm(5, generator=torch.Generator().manual_seed(ctx.seed))
        """
        return self.settings.training.seed

    @property
    def mode(self) -> str:
        """``"sync"`` or ``"async"``: the mode in force, which ``paramserver set`` may change while the job runs.

        >>> ctx.mode
        'sync'
        """
        return self.engine.modes.present.mode.value
