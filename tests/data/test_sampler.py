from itertools import islice

import numpy as np
import pytest

from vitrail import ConfigError
from vitrail.data.loader import EvalSampler, TrainSampler, balanced_probabilities, epoch_order


def take(order, steps):
    return list(islice(order, steps))


def test_epoch_is_a_permutation():
    batches = take(TrainSampler(samples=10, batch_size=4), 5)  # 20 places: two epochs
    places = [place for batch in batches for place in batch]
    for epoch in (0, 1):
        assert sorted(p.row for p in places if p.epoch == epoch) == list(range(10))


def test_epochs_and_seeds_differ():
    def rows(seed):
        return [
            [p.row for p in b] for b in take(TrainSampler(samples=50, batch_size=50, seed=seed), 2)
        ]

    assert rows(0)[0] != rows(0)[1]
    assert rows(0)[0] != rows(1)[0]
    assert rows(3) == rows(3)


@pytest.mark.parametrize("start", [0, 1, 5, 17])
def test_start_step_continues_the_stream(start):
    whole = take(TrainSampler(samples=13, batch_size=4, seed=3), 25)
    late = take(TrainSampler(samples=13, batch_size=4, seed=3, start_step=start), 25 - start)
    assert late == whole[start:]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_batches_do_not_depend_on_the_number_of_processes(world):
    alone = take(TrainSampler(samples=13, batch_size=8, seed=1), 10)
    shares = [
        take(TrainSampler(samples=13, batch_size=8, seed=1, rank=rank, world_size=world), 10)
        for rank in range(world)
    ]
    together = [[place for share in step for place in share] for step in zip(*shares, strict=True)]
    assert together == alone


def test_batch_larger_than_the_dataset():
    (batch,) = take(TrainSampler(samples=3, batch_size=8), 1)
    assert [place.epoch for place in batch] == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("samples", [0, 1, 7, 16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_eval_sampler_covers_every_sample_once(samples, world):
    orders = [
        EvalSampler(samples=samples, batch_size=4, rank=rank, world_size=world)
        for rank in range(world)
    ]
    seen = [place.row for order in orders for batch in order for place in batch]
    assert sorted(seen) == list(range(samples))
    assert all(len(list(order)) == len(order) for order in orders)


def test_repeated_augmentation():
    batches = take(TrainSampler(samples=5, batch_size=6, repeats=3), 5)  # two epochs of 15
    places = [place for batch in batches for place in batch]
    assert [place.repeat for place in places] == [0, 1, 2] * 10
    for start in range(0, 30, 3):
        assert len({(place.epoch, place.row) for place in places[start : start + 3]}) == 1
    assert sorted(p.row for p in places[:15]) == sorted(list(range(5)) * 3)
    assert len({place.rng(0).random() for place in places}) == 30


def test_invalid_samplers_are_rejected():
    with pytest.raises(ConfigError, match="not divisible by 3 processes; try 12"):
        TrainSampler(samples=5, batch_size=10, world_size=3)
    with pytest.raises(ConfigError, match="training set is empty"):
        TrainSampler(samples=0, batch_size=10)


def test_sample_rng_depends_on_sample_and_epoch():
    first, second = take(TrainSampler(samples=2, batch_size=2), 2)
    draws = {place.rng(0).random() for place in first + second}
    assert len(draws) == 4
    assert first[0].rng(0).random() == first[0].rng(0).random()


def test_balanced_sampling_draws_every_class_equally_often():
    class_ids = np.repeat([0, 1, 2], [90, 9, 1])
    order = epoch_order(100, 0, 0, balanced_probabilities(class_ids, 1.0))
    drawn = np.bincount(class_ids[order])
    assert (abs(drawn - 100 / 3) < 1).all()
    natural = epoch_order(100, 0, 0, balanced_probabilities(class_ids, 0.0))
    assert sorted(natural) == list(range(100))
    half = np.bincount(class_ids[epoch_order(1400, 0, 0, balanced_probabilities(class_ids, 0.5))])
    np.testing.assert_allclose(half / half.sum(), np.sqrt([90, 9, 1]) / 13.487, atol=0.01)


def test_uses_of_a_sample_in_an_epoch_have_their_own_randomness():
    class_ids = np.array([0] * 9 + [1])
    probabilities = balanced_probabilities(class_ids, 1.0)
    keys = take(TrainSampler(samples=10, batch_size=10, probabilities=probabilities), 1)[0]
    assert [key.repeat for key in keys if key.row == 9] == list(range(5))
    late = TrainSampler(samples=10, batch_size=5, start_step=3, probabilities=probabilities)
    whole = TrainSampler(samples=10, batch_size=5, probabilities=probabilities)
    assert take(late, 2) == take(whole, 5)[3:]


def test_views_repeat_after_their_number_of_epochs():
    keys = take(TrainSampler(samples=4, batch_size=4, views=3), 6)
    randomness = [{key.row: key.rng(0).random() for key in batch} for batch in keys]
    assert randomness[0] == randomness[3]
    assert randomness[2] == randomness[5]
    assert len({draws[0] for draws in randomness}) == 3
