"""Element types agree between their tables, and tensors share memory with the bytes they came from."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from paramserver.errors import ModelError, ProtocolError
from paramserver.tensors.dtypes import (
    SIZES,
    WIRE,
    buffer_of,
    dtype_name,
    itemsize,
    tensor_from,
    torch_dtype,
    wire_dtype,
)


@pytest.mark.parametrize("name", SIZES)
def test_tables_agree(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    assert dtype.itemsize == itemsize(name)


def test_types_on_the_wire() -> None:
    assert {name: wire_dtype(name) for name in WIRE} == {"float32": 1, "float64": 2}
    with pytest.raises(ModelError, match="does not travel"):
        wire_dtype("int64")


@pytest.mark.parametrize("name", ["complex64", "nn", "float32.x", "", "qint8", "x" * 1000])
def test_other_types_are_refused(name: str) -> None:
    for function in (itemsize, torch_dtype):
        with pytest.raises(ModelError, match="not supported"):
            function(name)


def test_unsupported_torch_type_is_refused() -> None:
    with pytest.raises(ModelError, match="complex64"):
        dtype_name(torch.complex64)


@pytest.mark.parametrize("name", SIZES)
def test_tensor_shares_the_memory_of_read_only_bytes(name: str) -> None:
    """Without a warning, at any alignment, and for as long as the tensor lives."""
    size = itemsize(name)
    raw = bytes(range(1, 2)) * (8 * size + 3)
    view = memoryview(raw)[3:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_from(view, name)
    assert tensor.shape == (8,)
    assert tensor.dtype == torch_dtype(name)
    assert tensor.data_ptr() == np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    expected = bytes(view)
    del view, raw
    gc.collect()
    assert bytes(tensor.view(torch.uint8).tolist()) == expected


def test_values_and_gradients_of_shared_tensors() -> None:
    values = np.array([1.5, -2.0, 3.25])
    assert tensor_from(values.tobytes(), "float64").tolist() == values.tolist()
    assert tensor_from(bytearray(values.tobytes()), "float64").tolist() == values.tolist()
    assert tensor_from(memoryview(values.tobytes()).cast("d"), "float64").tolist() == values.tolist()


def test_empty_and_broken_lengths() -> None:
    assert tensor_from(b"", "float32").shape == (0,)
    with pytest.raises(ProtocolError, match="7 bytes"):
        tensor_from(bytes(7), "float32")


@pytest.mark.parametrize("name", SIZES)
def test_bytes_of_a_tensor(name: str) -> None:
    tensor = torch.arange(6).to(torch_dtype(name)).reshape(2, 3)
    data = buffer_of(tensor)
    assert data.nbytes == 6 * itemsize(name)
    assert torch.equal(tensor_from(data, name), tensor.reshape(-1))
    assert np.frombuffer(data, np.uint8).__array_interface__["data"][0] == tensor.data_ptr()


def test_bytes_of_scalars_empty_tensors_and_parameters() -> None:
    assert bytes(buffer_of(torch.tensor(1.0))) == b"\x00\x00\x80\x3f"
    assert bytes(buffer_of(torch.empty(0))) == b""
    assert bytes(buffer_of(torch.nn.Parameter(torch.ones(1)))) == b"\x00\x00\x80\x3f"
    with pytest.raises(AssertionError):
        buffer_of(torch.ones(3, 2).t())


def test_a_tensor_that_is_only_marked_as_conjugated_or_negated_is_refused() -> None:
    """Its memory has other numbers."""
    numbers = torch.tensor([1 + 2j, 3 + 4j])
    imaginary = numbers[:1].conj().imag
    assert imaginary.is_neg()
    for marked in (numbers.conj(), imaginary):
        with pytest.raises(AssertionError):
            buffer_of(marked)


def test_importing_tensors_does_not_import_torch() -> None:
    code = (
        "import sys, paramserver.tensors.codec, paramserver.tensors.dtypes, paramserver.tensors.hypers\n"
        "import paramserver.core.layout.hypers\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
