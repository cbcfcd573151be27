import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.models.pos_embed import RESIZE_METHODS, resize_grid, resize_line


def test_tables_stretch_as_the_authors_stretch_them(golden):
    arrays = np.load(golden / "position-resize.npz")
    names = [name for name in arrays.files if name.startswith("in_")]
    assert names
    for name in names:
        expected = arrays[name.replace("in_", "out_")]
        ours = resize_grid(torch.from_numpy(arrays[name]), expected.shape[:2])
        assert np.abs(ours.numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("method", RESIZE_METHODS)
@pytest.mark.parametrize("grid", [(24, 24), (24, 16), (5, 9), (1, 3)])
def test_two_matrix_products_are_torchs_resize(method, grid):
    table = torch.randn(14, 10, 6, dtype=torch.float64)
    theirs = F.interpolate(table.permute(2, 0, 1)[None], grid, **RESIZE_METHODS[method])[0]
    torch.testing.assert_close(
        resize_grid(table, grid, method), theirs.permute(1, 2, 0), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("method", RESIZE_METHODS)
def test_the_same_grid_changes_nothing(method):
    table = torch.randn(4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(resize_grid(table, (4, 5), method), table)


def test_corners_stay_where_they_are():
    line = torch.randn(7, 2, dtype=torch.float64)
    longer = resize_line(line, 13)
    torch.testing.assert_close(longer[[0, -1]], line[[0, -1]])
    torch.testing.assert_close(longer[::2], line)


def test_gradients_flow_through_a_resize():
    table = torch.randn(3, 3, 2, requires_grad=True)
    resize_grid(table, (5, 5)).sum().backward()
    assert table.grad is not None
    assert table.grad.sum().item() == pytest.approx(50, rel=1e-5)


def test_half_precision_is_resized_in_full():
    table = torch.randn(7, 7, 4)
    for method in RESIZE_METHODS:
        exact = resize_grid(table.bfloat16().float(), (9, 12), method)
        assert torch.equal(resize_grid(table.bfloat16(), (9, 12), method), exact.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = resize_grid(table, (9, 12), method)
        assert torch.equal(inside, resize_grid(table, (9, 12), method))
