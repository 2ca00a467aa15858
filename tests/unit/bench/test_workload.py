"""The workloads are the same numbers wherever they are made."""

from itertools import islice

from tests.bench.turns import Workload
from tests.bench.workload import fitted, fixed_jobs, serving_jobs, splitmix64


def test_splitmix64_yields_the_published_sequence_of_seed_1234567():
    # From the reference implementation's well-known test vector.
    assert list(islice(splitmix64(1234567), 5)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_serving_workload_is_the_one_that_the_peer_was_given():
    jobs = serving_jobs()
    assert len(jobs) == 512
    assert sum(len(job.prompt) for job in jobs) == 282_667
    assert sum(job.num_output for job in jobs) == 145_238
    first, last = jobs[0], jobs[-1]
    assert (len(first.prompt), first.num_output, first.prompt[:3]) == (
        270,
        256,
        [24722, 38590, 60722],
    )
    assert (len(last.prompt), last.num_output, last.prompt[-1]) == (441, 309, 52948)


def test_a_shorter_serving_workload_is_the_beginning_of_the_longer_one():
    assert serving_jobs(3) == serving_jobs(5)[:3]


def test_fixed_prompts_of_two_seeds_share_no_beginning():
    one, other = fixed_jobs(4, 16, 2, seed=1), fixed_jobs(4, 16, 2, seed=2)
    assert len({job.prompt[0] for job in one + other}) == 8
    assert all(len(job.prompt) == 16 and job.num_output == 2 for job in one)
    assert fixed_jobs(2, 3, 1)[1].prompt == [81235, 69761, 31048]


def test_sessions_of_turns_are_those_that_the_peer_was_given():
    workload = Workload(num_sessions=48, num_turns=6, num_system=3000, vocab_size=10**9)
    assert workload.system_prompt(0)[:3] == [12557, 27347, 22287]
    turns = [turn for session in range(48) for turn in workload.turns(0, session)]
    assert [(len(added), num, added[0]) for added, num in turns[:2]] == [
        (120, 183, 15146),
        (890, 121, 91593),
    ]
    assert sum(len(added) for added, _ in turns) == 160_100
    assert sum(num_output for _, num_output in turns) == 46_969


def test_fitted_jobs_keep_to_the_models_limits():
    jobs = fitted(serving_jobs(20), vocab_size=100, max_model_len=300)
    assert all(token_id < 100 for job in jobs for token_id in job.prompt)
    assert all(len(job.prompt) + job.num_output <= 300 for job in jobs)
    assert all(job.prompt and job.num_output for job in jobs)


def test_a_full_size_model_gets_the_jobs_as_they_are():
    jobs = serving_jobs(20)
    assert fitted(jobs, vocab_size=151936, max_model_len=8448) == jobs
