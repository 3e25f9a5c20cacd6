"""Random numbers by their place: the runs of a seed stay what they are."""

import pytest
import torch

from training.runtime.counter_rng import Purpose, bits, derive_key, permutation, rand_float, rand_int, uniform

KEY = derive_key(7, Purpose.ORDER, 3, 1)
PLACES = torch.tensor([0, 5])


def test_random_bits_are_those_of_splitmix64() -> None:
    # The numbers that the reference implementation (Vigna, splitmix64.c) gives for this seed.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [value % 2**64 for value in bits(1234567, torch.arange(4)).tolist()] == expected


def test_purposes_keep_their_numbers() -> None:
    names = ("WEIGHTS", "HOLD_OUT", "ORDER", "AUGMENTATION", "STEP", "MIX", "CUT", "ERASE")
    assert {purpose.name: purpose.value for purpose in Purpose} == {name: place for place, name in enumerate(names, 1)}


def test_numbers_of_a_seed_are_those_of_earlier_releases() -> None:
    """Another number would train the runs of a seed otherwise, and resume none of them."""
    assert derive_key(7, Purpose.ORDER, 3, 1) == 351706491772804131
    assert derive_key(0, Purpose.ORDER) == derive_key(2**64, Purpose.ORDER) == 8939998939064762456
    assert derive_key(-1, Purpose.ORDER) == 18107108118898898902
    assert bits(KEY, PLACES).tolist() == [9180785733178519276, 4968869521404226843]
    assert uniform(KEY, PLACES).tolist() == [0.4976913332939148, 0.2693629264831543]
    assert rand_int(KEY, PLACES, 1000).tolist() == [497, 269]
    assert permutation(KEY, 8).tolist() == [2, 7, 3, 4, 6, 1, 5, 0]


@pytest.mark.parametrize("seed", range(4))
def test_number_without_tensors_is_the_same(seed: int) -> None:
    key = derive_key(seed, Purpose.MIX)
    numbers = [value % 2**64 // 2**11 / 2**53 for value in bits(key, torch.arange(20)).tolist()]
    assert [rand_float(key, place) for place in range(20)] == numbers
