"""DeepSeek V4's config.json: what is read, and what is refused by the name of its field."""

import json

import pytest

from models.config import ConfigError, ModelConfig
from tests.bench.model_folder import read_shape


def read(folder, **changes):
    (folder / "config.json").write_text(json.dumps(read_shape("deepseek-v4-flash") | changes))
    return ModelConfig.from_folder(folder)


def test_the_released_shape_is_read(tmp_path):
    config = read(tmp_path)
    assert [config.mixer(layer) for layer in range(4)] == ["attention"] * 2 + ["compressed"] * 2
    assert config.cache_windows[:4] == (128, 128, None, 128)
    assert config.cache_spans[:4] == (1, 1, 16, 1)
    assert config.moe.hash_layers == {0, 1, 2}
    assert config.compression.row_sizes(2) == (3072, 640)
    assert config.compression.row_sizes(3) == (1536, 512)
    assert config.stream_size == 4 * 4096
    # Cosines and sines are not scaled, as they would be by the rule of YaRN.
    assert (config.rope.rope_type, config.rope.theta, config.rope.table_scale) == ("yarn", 16e4, 1)
    assert (config.rope_of(0).rope_type, config.rope_of(0).theta) == ("default", 1e4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"o_groups": 7}, "o_groups is 7; it must be a divisor of 64 heads"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be even"),
        ({"qk_rope_head_dim": 256}, "at most head_dim and index_head_dim"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; it must be 1"),
        ({"compress_rate_hca": 2**13}, "compress_rate_hca is 8192; it must be at most 4096"),
        ({"hc_sinkhorn_iters": 2**31}, "hc_sinkhorn_iters is .*; it must be at most 1024"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; it must be one of sqrtsoftplus"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types is .*heavily_compressed_attention"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types is .*hash_moe or moe for every layer"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, **changes)
