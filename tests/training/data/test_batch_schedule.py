"""Which images are where: a matter of the seed and counters alone."""

import pytest

from training.data.batch_schedule import BatchSchedule, evaluation_requests, split_range


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
def test_the_ranks_share_a_global_batch_that_is_the_same_for_any_number_of_them(world_size: int) -> None:
    schedule = BatchSchedule(samples=100, batch_size=22, epochs=2, seed=4)
    alone = [request.indices for request in schedule.requests(0, 0, 0, 1)]
    shared = zip(*(schedule.requests(0, 0, rank, world_size) for rank in range(world_size)), strict=True)
    for batch, shares in zip(alone, shared, strict=True):
        assert sum((request.indices for request in shares), ()) == batch
        sizes = [len(request.indices) for request in shares]
        assert max(sizes) - min(sizes) <= 1


def test_an_epoch_uses_no_image_twice_and_leaves_out_less_than_a_batch() -> None:
    schedule = BatchSchedule(samples=100, batch_size=22, epochs=2, seed=4)
    requests = list(schedule.requests(0, 0, 0, 1))
    assert [request.epoch for request in requests] == [0] * 4 + [1] * 4, "each epoch augments otherwise"
    batches = [request.indices for request in requests]
    assert [schedule.batch(step) for step in range(1, 9)] == list(map(list, batches))
    assert (schedule.steps_per_epoch, schedule.total_steps, len(batches)) == (4, 8, 8)
    first, second = (sum(batches[epoch * 4 : epoch * 4 + 4], ()) for epoch in (0, 1))
    assert len(set(first)) == len(set(second)) == 88
    assert set(first) != set(second)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_repetitions_of_an_image_are_other_samples_in_the_same_batch_at_any_number_of_ranks(world_size: int) -> None:
    schedule = BatchSchedule(samples=101, batch_size=20, epochs=3, seed=4, samples_per_group=2, repetitions=4)
    assert (schedule.steps_per_epoch, schedule.total_steps) == (5, 15)
    shares = zip(*(schedule.requests(0, 0, rank, world_size) for rank in range(world_size)), strict=True)
    batches = [sum((request.indices for request in share), ()) for share in shares]
    seen = []
    for step, batch in enumerate(batches, start=1):
        images = [sample % 101 for sample in batch]
        assert schedule.batch(step) == images
        assert sorted(batch) == sorted(image + 101 * repetition for image in set(images) for repetition in range(4))
        assert all(one != other for one, other in zip(images[::2], images[1::2], strict=True)), "mixed with itself"
        seen.append(set(images))
    for epoch in range(3):
        assert len(set().union(*seen[5 * epoch : 5 * epoch + 5])) == 25
        rest = list(schedule.requests(epoch, 40, 0, world_size))
        assert rest == list(schedule.requests(0, 0, 0, world_size))[5 * epoch + 2 :]
    assert seen[0] != seen[5]


def test_repetitions_that_do_not_divide_the_batch_go_on_in_the_next() -> None:
    schedule = BatchSchedule(samples=50, batch_size=10, epochs=1, seed=4, repetitions=4)
    samples = [sample for request in schedule.requests(0, 0, 0, 1) for sample in request.indices]
    assert len(set(samples)) == 50
    images = [sample % 50 for sample in samples]
    assert sorted(images.count(image) for image in set(images)) == [2, *[4] * 12]


def test_epoch_and_samples_seen_are_the_whole_position() -> None:
    schedule = BatchSchedule(samples=100, batch_size=22, epochs=3, seed=4)
    whole = list(schedule.requests(0, 0, 1, 3))
    for steps in range(schedule.total_steps + 1):
        epoch, in_epoch = divmod(steps, schedule.steps_per_epoch)
        assert list(schedule.requests(epoch, in_epoch * 22, 1, 3)) == whole[steps:]


@pytest.mark.parametrize("samples", [1, 2, 10, 101, 256])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_an_evaluation_asks_for_every_sample_once_and_for_equally_many_batches_of_all_ranks(
    samples: int, world_size: int
) -> None:
    asked = [list(evaluation_requests(samples, 16, rank, world_size)) for rank in range(world_size)]
    indices = [index for requests in asked for request in requests for index in request.indices]
    assert sorted(indices) == list(range(samples))
    assert len({len(requests) for requests in asked}) == 1
    assert {request.epoch for requests in asked for request in requests} == {None}, "nothing is augmented"
    batches = {request.indices for requests in asked for request in requests if request.indices}
    assert batches == {tuple(range(first, min(first + 16, samples))) for first in range(0, samples, 16)}


def test_shares_cover_everything_and_leave_pairs_on_one_rank() -> None:
    assert [split_range(10, rank, 4) for rank in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [split_range(10, rank, 4, samples_per_group=2) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 10)]
    assert [split_range(7, rank, 3, samples_per_group=2) for rank in range(3)] == [(0, 2), (2, 4), (4, 7)]
