"""A flood of scrapes costs no more than a few pages."""

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from services.telemetry.metrics_page import MetricsPage


class Counting(Collector):
    """Counts how often it is read."""

    num_reads = 0

    def collect(self):
        self.num_reads += 1
        return ()


async def test_calls_at_the_same_time_share_pages_and_a_later_one_gets_a_later_page():
    registry, collector = CollectorRegistry(), Counting()
    registry.register(collector)
    collector.num_reads = 0
    page = MetricsPage(registry)
    answers = await asyncio.gather(*(page.render("") for _ in range(100)))
    assert len(set(answers)) == 1
    assert collector.num_reads == 1
    await page.render("")
    assert collector.num_reads == 2


async def test_forms_are_rendered_apart():
    page = MetricsPage(CollectorRegistry())
    forms = ["", "application/openmetrics-text; version=1.0.0"]
    (_, plain), (_, openmetrics) = await asyncio.gather(*map(page.render, forms))
    assert plain.startswith("text/plain")
    assert openmetrics.startswith("application/openmetrics-text")


async def test_a_caller_that_goes_away_takes_nothing_from_others():
    page = MetricsPage(CollectorRegistry())
    gone, stays = (asyncio.create_task(page.render("")) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays)[1].startswith("text/plain")
