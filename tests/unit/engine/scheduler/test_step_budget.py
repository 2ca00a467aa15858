from services.engine.scheduler.recovery import NUM_GOOD_STEPS, StepBudget


def test_a_failed_step_halves_what_it_had():
    budget = StepBudget(2048)
    budget.halve(1000)
    assert budget.tokens == 500


def test_a_failed_step_that_was_larger_than_steps_may_be_now_halves_those():
    budget = StepBudget(2048)
    budget.halve(100)
    budget.halve(1000)
    assert budget.tokens == 25


def test_one_token_is_always_left():
    budget = StepBudget(8)
    budget.halve(1)
    assert budget.tokens == 1


def test_after_many_good_steps_twice_as_many_tokens_are_tried_up_to_the_limit():
    budget = StepBudget(100)
    budget.halve(90)
    for _ in range(NUM_GOOD_STEPS):
        assert budget.tokens == 45
        budget.count_good_step()
    assert budget.tokens == 90
    for _ in range(NUM_GOOD_STEPS):
        budget.count_good_step()
    assert budget.tokens == 100


def test_a_failure_makes_the_count_of_good_steps_start_over():
    budget = StepBudget(100)
    budget.halve(100)
    for _ in range(NUM_GOOD_STEPS - 1):
        budget.count_good_step()
    budget.halve(50)
    budget.count_good_step()
    assert budget.tokens == 25


def test_steps_that_must_hold_an_image_do_not_shrink_further():
    budget = StepBudget(64, least=12)
    budget.halve(64)
    assert budget.tokens == 32
    budget.halve(32)
    budget.halve(16)
    assert budget.tokens == budget.least == 12
