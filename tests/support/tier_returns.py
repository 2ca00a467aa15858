"""The benchmark of tiers, with engines that load always: no measured time decides its figures."""

from services.engine.kv_cache.recompute_rule import RecomputeRule
from tests.bench.tier_returns import main

if __name__ == "__main__":
    # A rule that knows no time of computing has everything loaded.
    RecomputeRule.observe_prompts = lambda *_: None  # type: ignore[method-assign]
    main()
