"""Images are read in processes that hostile files cannot harm."""

import asyncio
import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from PIL import Image

from services.frontend.errors import InvalidRequestError, OverloadedError
from services.frontend.images import reader as reader_module
from services.frontend.images.files.decoding import decode
from services.frontend.images.files.header import read_header
from services.frontend.images.limits import ImageLimits
from services.frontend.images.processor import ImageProcessor
from services.frontend.images.reader import ImageReader
from tests.support.child_processes import children_that_run
from tests.support.hostile_images import disarmed_files, refused_files
from tests.support.image_files import encoded, ihdr, picture, png
from tests.support.image_settings import settings_text
from tests.support.waiting import until

IMAGE = encoded(picture(120, 90), "PNG")
MODEL = {
    "kind": "qwen_vl",
    "settings": settings_text("qwen_vl"),
    "image_token_id": 7,
    "max_patches": 16384,
}
HELD_MIB = 200
"""Memory of a helper that has read small images."""


@contextlib.asynccontextmanager
async def reading(**options):
    reader = ImageReader(**{"num_processes": 1, **MODEL, **options})
    try:
        yield reader
    finally:
        await reader.close()


def helpers() -> list[psutil.Process]:
    return children_that_run("services.frontend.images.worker")


async def test_an_image_is_processed_as_in_this_process():
    processor = ImageProcessor(**MODEL)
    async with reading() as reader:
        for size in [(120, 90), (31, 47)]:
            data = encoded(picture(*size), "JPEG")
            expected = processor.process(decode(data, read_header(data, ImageLimits())))
            assert await reader.read(data) == expected
        lowered = await reader.read(IMAGE, max_patches=4)
        assert len(lowered.tokens) == 1


async def test_several_images_of_a_prompt_have_less_detail_where_the_family_says_so():
    family = {"kind": "llava_onevision", "settings": settings_text("llava_onevision")}
    async with reading(**family) as reader:
        assert (await reader.read(IMAGE)).grid[0] == 2
        assert (await reader.read(IMAGE, is_only_image=False)).grid[0] == 1


async def test_hostile_files_are_refused_in_one_line_and_take_no_memory():
    files = refused_files()
    assert len(files) >= 60
    async with reading() as reader:
        expected = await reader.read(IMAGE)
        [helper] = helpers()
        for name, data in files.items():
            with pytest.raises(InvalidRequestError) as refusal:
                await reader.read(data)
            assert "\n" not in str(refusal.value), name
            assert 10 < len(str(refusal.value)) < 200, name
        assert await reader.read(IMAGE) == expected
        assert helpers() == [helper]
        assert peak_mib(helper) < HELD_MIB


async def test_bombs_beside_a_picture_are_left_out():
    async with reading() as reader:
        for name, (data, plain) in disarmed_files().items():
            assert await reader.read(data) == await reader.read(plain), name
        [helper] = helpers()
        assert peak_mib(helper) < HELD_MIB


def is_decoding(helper: psutil.Process) -> bool:
    return helper.memory_info().rss > 2**28


def peak_mib(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


async def test_limits_are_of_bytes_and_pixels():
    limits = ImageLimits(max_bytes=len(IMAGE), max_pixels=120 * 90)
    async with reading(limits=limits) as reader:
        await reader.read(IMAGE)
        with pytest.raises(InvalidRequestError, match="bytes; the limit is"):
            await reader.read(IMAGE + b"x")
        with pytest.raises(InvalidRequestError, match="120 x 91 pixels; the limit is 10800"):
            await reader.read(encoded(Image.new("RGB", (120, 91)), "PNG"))


async def test_a_process_has_limits_of_memory_files_and_processor_time():
    limits = ImageLimits(max_pixels=10**6, cpu_s=9)
    async with reading(limits=limits) as reader:
        await reader.read(IMAGE)
        [helper] = helpers()
        assert helper.rlimit(psutil.RLIMIT_AS) == (limits.memory_bytes, limits.memory_bytes)
        assert helper.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
        assert helper.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
        assert 9 < helper.rlimit(psutil.RLIMIT_CPU)[0] < 15


async def test_an_image_that_takes_too_long_ends_its_process_alone(monkeypatch):
    async with reading() as reader:
        await reader.read(IMAGE)
        helpers()[0].suspend()
        with monkeypatch.context() as patch:
            patch.setattr(reader, "_limits", ImageLimits(timeout_s=0.2))
            with pytest.raises(InvalidRequestError, match=r"decoding it took over 0\.2 s"):
                await reader.read(IMAGE)
        assert helpers() == []
        assert (await reader.read(IMAGE)).tokens


async def test_an_image_that_takes_too_much_processor_time_ends_its_process_alone():
    progressive = encoded(Image.new("L", (14000, 14000)), "JPEG", progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    slow = progressive[:-2] + scan * 55 + progressive[-2:]
    async with reading(limits=ImageLimits(max_pixels=14000**2, cpu_s=1)) as reader:
        with pytest.raises(InvalidRequestError, match="decoding it broke down"):
            await reader.read(slow)
        assert (await reader.read(IMAGE)).tokens


async def test_a_crash_refuses_the_image_that_caused_it():
    slow = encoded(Image.new("RGB", (8000, 8000)), "PNG", compress_level=1)
    async with reading() as reader:
        reads = [asyncio.create_task(reader.read(slow))]
        await until(lambda: any(is_decoding(helper) for helper in helpers()))
        reads.append(asyncio.create_task(reader.read(IMAGE)))
        helpers()[0].send_signal(signal.SIGSEGV)
        crashed, other = await asyncio.gather(*reads, return_exceptions=True)
        assert isinstance(crashed, InvalidRequestError)
        assert other.tokens


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("MAX_WAITING", "2 images wait"), ("MAX_WAITING_OF_ACCOUNT", "2 of your images wait")],
)
async def test_images_over_the_queue_are_refused(monkeypatch, limit, reason):
    monkeypatch.setattr(reader_module, limit, 2)
    async with reading() as reader:
        tasks = [asyncio.create_task(reader.read(IMAGE)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=reason):
            await reader.read(IMAGE)
        if limit == "MAX_WAITING_OF_ACCOUNT":
            assert (await reader.read(IMAGE, account="other")).tokens
        assert all(read.tokens for read in await asyncio.gather(*tasks))
        assert (await reader.read(IMAGE)).tokens


async def test_a_caller_that_leaves_frees_its_turn():
    async with reading() as reader:
        await reader.read(IMAGE)
        tasks = [asyncio.create_task(reader.read(IMAGE)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(30):
            assert (await reader.read(IMAGE)).tokens
        assert len(helpers()) == 1


async def test_accounts_take_turns():
    async with reading() as reader:
        done: list[str] = []

        async def read(account: str) -> None:
            await reader.read(IMAGE, account=account)
            done.append(account)

        await asyncio.gather(*[read("busy") for _ in range(8)], read("other"))
        assert done.index("other") <= 2


async def test_large_images_are_read_one_at_a_time():
    large, small = (png(ihdr(side, side)) for side in (4001, 4000))
    async with reading(num_processes=4) as reader:
        for data, most in ((small, 4), (large, 1)):
            reader._pool = pool = NonsensePool()
            reads = [reader.read(data, account=str(i)) for i in range(6)]
            results = await asyncio.gather(*reads, return_exceptions=True)
            assert {type(result) for result in results} == {InvalidRequestError}
            assert pool.most_at_a_time == most


async def test_an_answer_that_is_no_image_is_refused():
    async with reading() as reader:
        reader._pool = NonsensePool()
        for answer in (b"", b"\0", b"\2\0\0\0\2", b"\2" + b"\0\0\0\2" * 2 + b"short", b"\x09" * 99):
            reader._pool.answer = answer
            with pytest.raises(InvalidRequestError, match="decoding it broke down"):
                await reader.read(IMAGE)


class NonsensePool:
    """Helper processes that a file has taken over."""

    answer = b""
    num_asked = 0
    most_at_a_time = 0

    async def ask(self, question, **limits):
        self.num_asked += 1
        self.most_at_a_time = max(self.most_at_a_time, self.num_asked)
        await asyncio.sleep(0)
        self.num_asked -= 1
        return self.answer

    async def close(self):
        """Nothing runs."""
