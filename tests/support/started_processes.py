"""Notes the processes that asyncio starts."""

import asyncio


def note_started_processes(monkeypatch):
    """Returns a list that gets each process that is started from now on, oldest first."""
    processes = []
    start = asyncio.create_subprocess_exec

    async def note(*arguments, **options):
        processes.append(await start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", note)
    return processes
