"""What arrays can be: every dtype, numpy and DLPack, in place, refused with variable and reason."""

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from tf_smb import Client, ElasticAveraging, Server
from tf_smb.errors import InvalidArgumentError, NotFoundError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ["float32", "float64", "float16", "bfloat16"]
OTHERS = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128"),
]
DTYPES = FLOATS + OTHERS
WIDE = {"float16": "float32", "bfloat16": "float32"}
# The last does not fit into one chunk of the center in any dtype.
SHAPES = [(), (0,), (1,), (3, 0, 2), (7, 9), (300_001,)]


# Hand-made capsules below have versions with every numpy.
needs_versions = pytest.mark.skipif(
    tuple(int(part) for part in np.__version__.split(".")[:2]) < (2, 1),
    reason="numpy's own DLPack capsules say only from 2.1 on whether they may be written",
)


def numpy_dtype(name):
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def some(dtype, shape, seed=0):
    """Values all over the dtype's range; no NaN or Inf."""
    dtype = numpy_dtype(dtype)
    random = np.random.default_rng(seed)
    size = int(np.prod(shape))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = random.integers(info.min, info.max, size, dtype, endpoint=True)
    elif dtype.kind == "b":
        values = random.integers(0, 2, size).astype(np.bool_)
    elif dtype.kind == "c":
        values = random.standard_normal(size) + 1j * random.standard_normal(size)
    else:
        values = random.standard_normal(size) * 1000
    return np.asarray(values.astype(dtype)).reshape(shape)


@pytest.fixture
def client():
    with Server() as server:
        yield Client(server.address)


def same_bytes(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


# --- Every dtype -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(client, dtype):
    segment = client.create("run", [(f"v{i}", shape, dtype) for i, shape in enumerate(SHAPES)])
    assert segment.variables == [(f"v{i}", s, dtype) for i, s in enumerate(SHAPES)]
    arrays = [some(dtype, shape) for shape in SHAPES]
    segment.write(arrays)
    for read, written in zip(segment.read(), arrays, strict=True):
        same_bytes(read, written)
    for read, written in zip(segment.read(wide=True), arrays, strict=True):
        same_bytes(read, written.astype(WIDE.get(dtype, written.dtype)))
    for i, array in enumerate(arrays):
        flat = array.reshape(-1)
        for start, count in ((0, flat.size), (flat.size // 3, flat.size // 2), (flat.size, 0)):
            same_bytes(segment.read_slice(i, start, count), flat[start : start + count])
    # Every element size over the borders of chunks, by name.
    part = some(dtype, 200_000, seed=1)
    segment.write_slice("v5", 50_001, part)
    expected = arrays[5].copy()
    expected[50_001:250_001] = part
    same_bytes(segment.read()[5], expected)
    assert segment.version == 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_accumulate_is_the_centers_arithmetic(client, dtype):
    segment = client.create("run", [(f"v{i}", shape, dtype) for i, shape in enumerate(SHAPES)])
    wide = np.dtype(WIDE.get(dtype, dtype))
    center = [some(dtype, shape).astype(wide) for shape in SHAPES]
    segment.write([array.astype(numpy_dtype(dtype)) for array in center])
    for seed, scale in enumerate((1.0, -0.1, 1 / 3), start=1):
        arrays = [some(dtype, shape, seed) for shape in SHAPES]
        segment.accumulate(arrays, scale)
        center = [
            np.asarray(g + wide.type(scale) * a.astype(wide))
            for g, a in zip(center, arrays, strict=True)
        ]
        for read, expected in zip(segment.read(wide=True), center, strict=True):
            same_bytes(read, expected)
    part = some(dtype, 1000, seed=9)
    segment.accumulate_slice(5, 65_000, part, scale=0.5)
    center[5][65_000:66_000] += wide.type(0.5) * part.astype(wide)
    same_bytes(segment.read(wide=True)[5], center[5])
    assert segment.version == 5


@pytest.mark.parametrize("dtype", OTHERS)
def test_what_is_not_a_float_is_not_added_to(client, dtype):
    segment = client.create("run", [("n", (3,), dtype), ("w", (2,))])
    first = [some(dtype, 3), np.zeros(2, np.float32)]
    segment.write(first)
    segment.accumulate([some(dtype, 3, seed=1), np.ones(2, np.float32)])
    same_bytes(segment.read()[0], first[0])
    assert segment.read()[1].tolist() == [1, 1]
    with pytest.raises(InvalidArgumentError, match=rf"'n' {dtype}\[3\] can be read and written, b"):
        segment.accumulate_slice("n", 0, some(dtype, 3))


def test_ten_thousand_small_bfloat16_deltas(client):
    """Each far below what a bfloat16 center could hold."""
    segment = client.create("run", [("w", (5,), "bfloat16")])
    segment.write([np.full(5, 100, BFLOAT16)])
    delta = np.full(5, 1e-3, BFLOAT16)
    for _ in range(10_000):
        segment.accumulate([delta])
    expected = 100 + 10_000 * delta.astype(np.float64)
    np.testing.assert_allclose(segment.read(wide=True)[0], expected, rtol=1e-3)
    np.testing.assert_allclose(segment.read()[0].astype(np.float64), expected, rtol=2**-8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_axpy(client, dtype):
    layout = [(f"v{i}", shape, dtype) for i, shape in enumerate(SHAPES)]
    layout.append(("count", (4,), "int32"))
    target, source = client.create("target", layout), client.create("source", layout)
    wide = np.dtype(WIDE.get(dtype, dtype))
    a = [some(dtype, shape, 1) for shape in SHAPES]
    b = [some(dtype, shape, 2) for shape in SHAPES]
    target.write([*a, np.arange(4, dtype=np.int32)])
    source.write([*b, np.arange(4, dtype=np.int32)])
    target.axpy(0.3, source)
    target.axpy(1.0, target)
    for read, x, y in zip(target.read(wide=True), a, b, strict=False):
        moved = np.asarray(x.astype(wide) + wide.type(0.3) * y.astype(wide))
        same_bytes(read, np.asarray(moved + moved))
    assert target.read()[-1].tolist() == [0, 1, 2, 3]
    assert target.version == 3
    assert source.version == 1
    for read, y in zip(source.read(), b, strict=False):
        same_bytes(read, y)


# --- Names of dtypes and places ---------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float64, "float64"),
        (np.dtype("int16"), "int16"),
        ("f2", "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (BFLOAT16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        (bool, "bool"),
        (complex, "complex128"),
    ],
)
def test_dtypes_accepted(client, dtype, name):
    assert client.create("run", [("w", (2,), dtype)]).variables == [("w", (2,), name)]


@pytest.mark.parametrize(
    "dtype", [None, 5, "nothing", ">f4", np.dtype(">i8"), "U3", "O", "datetime64[s]", "f4,f4"]
)
def test_dtypes_refused(client, dtype):
    with pytest.raises(
        InvalidArgumentError, match="variable 'w' (must have a|has) dtype"
    ) as caught:
        client.create("run", [("w", (2,), dtype)])
    known = "; a segment can hold float32, " in str(caught.value)
    assert known or repr(dtype) in str(caught.value)


@pytest.mark.parametrize("dtype", [np.longdouble, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_dtypes_that_no_segment_holds(client, dtype):
    name = np.dtype(dtype).name
    with pytest.raises(InvalidArgumentError, match=f"has dtype {name}; a segment can hold float32"):
        client.create("run", [("w", (2,), dtype)])
    segment = client.create("run", [("w", (2,))])
    with pytest.raises(InvalidArgumentError, match=f"float32.2., got {name} of 2 elements"):
        segment.write([np.zeros(2, dtype)])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("got", DTYPES)
def test_only_the_variables_dtype_fits_or_the_centers(client, dtype, got):
    segment = client.create("run", [("w", (2,), dtype)])
    array = np.ones(2, numpy_dtype(got))
    if got in (dtype, WIDE.get(dtype)):
        segment.write([array])
        return
    accepted = f"{dtype} or float32" if dtype in WIDE else dtype
    with pytest.raises(InvalidArgumentError) as caught:
        segment.write([array])
    assert str(caught.value).startswith(
        f"array 0 must be C-contiguous {accepted} like variable 'w' {dtype}[2], got {got} of 2 "
        "elements"
    )


def test_both_64_bit_integers_of_c(client):
    segment = client.create("run", [("n", (2,), "int64"), ("m", (2,), "uint64")])
    segment.write([np.arange(2, dtype=np.longlong), np.arange(2, dtype=np.ulonglong)])
    assert [array.tolist() for array in segment.read()] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("variable", "start", "count", "error", "words"),
    [
        (2, 0, 1, InvalidArgumentError, "has 2 variables, there is no variable 2"),
        (2**40, 0, 1, InvalidArgumentError, f"there is no variable {2**40}"),
        (-1, 0, 1, InvalidArgumentError, "variable must be an integer from 0 .*, got -1"),
        (1.0, 0, 1, InvalidArgumentError, "variable must be an integer"),
        (True, 0, 1, InvalidArgumentError, "variable must be an integer"),
        ("c", 0, 1, NotFoundError, "segment 'run' has no variable 'c'; it has 'a', 'b'"),
        ("a", -1, 1, InvalidArgumentError, "start must be an integer from 0 .*, got -1"),
        ("a", 0, 1.5, InvalidArgumentError, "count must be an integer from 0 .*, got 1.5"),
        ("a", 11, 0, InvalidArgumentError, r"elements 11 and 0 .* not within 'a' float32\[2,5\]"),
        ("a", 0, 11, InvalidArgumentError, "not within 'a'"),
        ("a", 10, 2**62, InvalidArgumentError, "not within 'a'"),
        ("a", 2**62, 2**62, InvalidArgumentError, "not within 'a'"),
    ],
)
def test_slices_that_are_not_there(client, variable, start, count, error, words):
    segment = client.create("run", [("a", (2, 5)), ("b", (3,))])
    with pytest.raises(error, match=words):
        segment.read_slice(variable, start, count)
    if isinstance(count, int) and count <= 11:
        array = np.ones(count, np.float32)
        for use in (segment.write_slice, segment.accumulate_slice):
            with pytest.raises(error, match=words):
                use(variable, start, array)
    assert segment.version == 0


def test_slices_of_variables_with_one_name(client):
    segment = client.create("run", [("w", (2,)), ("w", (2,)), ("b", (2,))])
    with pytest.raises(InvalidArgumentError, match="several variables .* are named 'w'"):
        segment.read_slice("w", 0, 1)
    segment.write_slice(1, 0, np.ones(2, np.float32))
    segment.write_slice("b", 1, np.full(1, 5, np.float32))
    assert [array.tolist() for array in segment.read()] == [[0, 0], [1, 1], [0, 5]]


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros(2), "float64 of 2 elements"),
        (np.zeros((4, 2), np.float32)[:, 0], "float32 of 4 elements, not C-contiguous and aligned"),
        ([0.0], "list"),
        (np.float32(1), "float32"),
    ],
)
def test_bad_slices(client, array, got):
    segment = client.create("run", [("w", (5,))])
    for use in (segment.write_slice, segment.accumulate_slice):
        with pytest.raises(
            InvalidArgumentError, match="the array must be C-contiguous float32 li"
        ) as e:
            use(0, 0, array)
        assert f"got {got}" in str(e.value)


@pytest.mark.parametrize(
    "scale", ["1", None, True, 1j, 10**400, [1.0, 2.0], float("nan"), float("-inf")]
)
def test_bad_scales(client, scale):
    segment = client.create("run", [("w", (2,))])
    for use in (
        lambda: segment.accumulate([np.ones(2, np.float32)], scale),
        lambda: segment.accumulate_slice(0, 0, np.ones(2, np.float32), scale),
        lambda: segment.axpy(scale, segment),
    ):
        with pytest.raises(InvalidArgumentError, match="scale must be a finite number, got ") as e:
            use()
        assert repr(scale) in str(e.value)
    assert segment.version == 0


def test_more_than_memory_is_right_at_its_last_element(client):
    """8 GiB, of which a few pages are ever touched."""
    count = 2**31
    segment = client.create("run", [("table", (count,))], sparse=True)
    segment.write_slice("table", count - 3, np.arange(3, dtype=np.float32))
    segment.accumulate_slice("table", count - 1, np.full(1, 40, np.float32))
    assert segment.read_slice("table", count - 4, 4).tolist() == [0, 0, 1, 42]
    assert segment.read_slice("table", 0, 2).tolist() == [0, 0]
    assert segment.status()["center_bytes"] == 4 * count
    for start in (2**30 - 1, 2**30):  # byte 2**32
        segment.write_slice("table", start, np.full(1, start - 2**30 + 5, np.float32))
    assert segment.read_slice("table", 2**30 - 2, 4).tolist() == [0, 4, 5, 0]
    with pytest.raises(InvalidArgumentError, match="not within 'table'"):
        segment.read_slice("table", count - 1, 2)
    client.free("run")


# --- DLPack ----------------------------------------------------------------------------


class Tensor:
    """A tensor of a library that is not numpy."""

    def __init__(self, array, versioned=True):
        self._array = array
        self._versioned = versioned

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self._versioned and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self._array.__dlpack__(**options)


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Plain(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class HandMade:
    """A tensor whose capsule is made byte by byte."""

    def __init__(self, array, code=2, bits=32, versioned=True, strides=None, **fields):
        self.array = array
        self.deleted = 0
        shape = fields.pop("shape", array.shape)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = strides and (ctypes.c_int64 * len(strides))(*strides)
        self._name = b"dltensor_versioned" if versioned else b"dltensor"
        self.managed = Versioned(1, 0) if versioned else Plain()
        tensor = self.managed.tensor
        tensor.data = fields.pop("data", array.ctypes.data)
        tensor.device_type, tensor.ndim = 1, len(shape)
        tensor.code, tensor.bits, tensor.lanes = code, bits, 1
        tensor.shape = self._shape
        if strides:
            tensor.strides = self._strides
        for name, value in fields.items():
            owner = self.managed if hasattr(self.managed, name) else tensor
            setattr(owner, name, value)
        self._deleter = DELETER(self._delete)
        self.managed.deleter = self._deleter

    def _delete(self, address):
        assert address == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack__(self, *, max_version=None):
        return new_capsule(ctypes.addressof(self.managed), self._name, None)


@pytest.fixture
def segment(client):
    with client.create("run", [("w", (2, 3))]) as segment:
        segment.write([np.zeros((2, 3), np.float32)])
        yield segment


def six(start=1):
    return np.arange(start, start + 6, dtype=np.float32).reshape(2, 3)


@needs_versions
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bfloat16"])
def test_tensors_are_used_in_place(client, dtype):
    segment = client.create("run", [(f"v{i}", shape, dtype) for i, shape in enumerate(SHAPES)])
    arrays = [some(dtype, shape) for shape in SHAPES]
    for versioned in (True, False):
        segment.write([Tensor(array, versioned) for array in arrays])
    into = [np.zeros_like(array) for array in arrays]
    segment.read_into([Tensor(array) for array in into])
    for read, written in zip(into, arrays, strict=True):
        same_bytes(read, written)


@pytest.mark.parametrize("versioned", [pytest.param(True, marks=needs_versions), False])
def test_exchange_of_tensors(client, versioned):
    a, b = (client.create("run", [("w", (2, 3)), ("b", (2,))]) for _ in range(2))
    x = [six(), np.zeros(2, np.float32)]
    rule = ElasticAveraging(moving_rate=0.5)
    if not versioned:  # JAX's and TensorFlow's are not to be written, and cannot say so
        with pytest.raises(InvalidArgumentError, match="array 0 is read-only, .* of this Tensor"):
            a.start([Tensor(array, versioned) for array in x], rule=rule)
        assert not a.joined
        return
    a.start([Tensor(array) for array in x], rule=rule)
    b.start([Tensor(array) for array in (six(9), np.ones(2, np.float32))], rule=rule)
    x[0] += 2
    assert a.exchange([Tensor(x[0]), x[1]]) == "moved"
    np.testing.assert_array_equal(x[0], six(2))
    np.testing.assert_array_equal(b.read()[0], six(2))


@pytest.mark.parametrize("versioned", [True, False])
def test_bfloat16_by_dlpack(client, versioned):
    segment = client.create("run", [("w", (3,), "bfloat16")])
    array = np.array([1, -2.5, 3e30], BFLOAT16)
    tensor = HandMade(array, code=4, bits=16, versioned=versioned)
    segment.write([tensor])
    assert tensor.deleted == 1
    same_bytes(segment.read()[0], array)
    # The center's own dtype fits too.
    segment.write([HandMade(np.array([5, 6, 7], np.float32), versioned=versioned)])
    assert segment.read()[0].tolist() == [5, 6, 7]


@pytest.mark.parametrize("versioned", [True, False])
def test_deleter_is_called_once(segment, versioned):
    for _ in range(3):
        tensor = HandMade(six(), versioned=versioned)
        segment.write([tensor])
        assert tensor.deleted == 1
        gc.collect()
        assert tensor.deleted == 1
    for bad in (
        HandMade(six().astype(np.float64), bits=64, versioned=versioned),
        HandMade(six(), strides=(1, 2), versioned=versioned),
        HandMade(six(), shape=(5,), versioned=versioned),
    ):
        with pytest.raises(InvalidArgumentError):
            segment.write([bad])
        assert bad.deleted == 1
    # One whose neighbour is refused.
    pair = [HandMade(six(), versioned=versioned), six()]
    with pytest.raises(InvalidArgumentError, match="1 variables, got 2 arrays"):
        segment.write(pair)
    assert pair[0].deleted == 0


def test_capsules_that_are_not_taken_are_left_to_their_owners(segment):
    for fields, words in (
        ({"device_type": 2}, "is on a device of DLPack's type 2, not in the CPU's memory"),
        ({"major": 2}, "capsule is of another version than 1"),
    ):
        tensor = HandMade(six(), **fields)
        with pytest.raises(InvalidArgumentError) as caught:
            segment.write([tensor])
        message = str(caught.value)
        assert message.startswith(
            "array 0, a HandMade, cannot be used as variable 'w' float32[2,3]: it"
        )
        assert words in message
        assert tensor.deleted == 0


def test_places_in_memory(segment):
    flat = np.arange(10, dtype=np.float32)
    segment.write([HandMade(flat, shape=(2, 3), byte_offset=8)])
    np.testing.assert_array_equal(segment.read()[0], six(2))
    segment.write([HandMade(six(), strides=(3, 1))])
    np.testing.assert_array_equal(segment.read()[0], six())
    segment.write([HandMade(six(), shape=(1, 6, 1), strides=(99, 1, 77))])
    target = HandMade(np.zeros(6, np.float32))
    segment.read_into([target])
    np.testing.assert_array_equal(target.array, six().ravel())
    for bad, words in (
        (HandMade(flat, shape=(2, 3), strides=(1, 2)), "not C-contiguous and aligned"),
        (HandMade(flat, shape=(2, 3), strides=(4, 1)), "not C-contiguous and aligned"),
        (HandMade(flat, shape=(2, 3), byte_offset=2), "not C-contiguous and aligned"),
        (HandMade(flat, shape=(7,)), "got HandMade, float32 of 7 elements"),
        (HandMade(flat, shape=(2, 3), lanes=2), "DLPack type 2 of 32 bits of 6 elements"),
        (HandMade(flat, shape=(2, 3), code=0), "got HandMade, int32 of 6 elements"),
        (HandMade(flat, shape=(2, 3), bits=8), "DLPack type 2 of 8 bits"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            segment.write([bad])
    np.testing.assert_array_equal(segment.read()[0], six())


def test_empty_tensors_may_have_no_memory(client):
    segment = client.create("run", [("w", (0, 3))])
    segment.write([HandMade(np.zeros((0, 3), np.float32), data=None, byte_offset=64)])
    segment.read_into([HandMade(np.zeros((0, 3), np.float32), data=None)])


@needs_versions
def test_read_only_tensors(segment):
    array = six()
    array.setflags(write=False)
    segment.write([Tensor(array)])
    with pytest.raises(InvalidArgumentError) as caught:
        segment.read_into([Tensor(array)])
    assert str(caught.value).startswith(
        "array 0 is read-only, and would be overwritten with variable 'w' float32[2,3]: pass a "
        "numpy array that shares the memory of this Tensor"
    )
    with pytest.raises(InvalidArgumentError, match="read-only"):
        segment.read_into([HandMade(six(), flags=1)])


def test_other_devices_are_not_asked_for_memory(segment):
    class OnGpu:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **options):
            raise AssertionError("asked")

    with pytest.raises(InvalidArgumentError, match="a OnGpu, .* device of DLPack's type 2"):
        segment.write([OnGpu()])


def test_what_a_tensor_raises_is_said(segment):
    class Refuses:
        def __init__(self, error):
            self.error = error

        def __dlpack__(self, **options):
            raise self.error

    with pytest.raises(InvalidArgumentError, match="raised BufferError: use tensor.detach"):
        segment.write([Refuses(BufferError("use tensor.detach()"))])
    with pytest.raises(InvalidArgumentError, match="raised TypeError: no"):
        segment.write([Refuses(TypeError("no"))])
    with pytest.raises(KeyboardInterrupt):
        segment.write([Refuses(KeyboardInterrupt())])

    class Nonsense:
        def __dlpack__(self, **options):
            return 5

    with pytest.raises(InvalidArgumentError, match="gave no DLPack capsule"):
        segment.write([Nonsense()])


def test_arrays_live_as_long_as_the_call(client):
    """Even if looking at one of them throws the list away."""
    died = []

    class Clears(Tensor):
        def __dlpack__(self, **options):
            arrays.clear()
            gc.collect()
            return super().__dlpack__(**options)

    class Watched(np.ndarray):
        pass

    arrays = [Clears(six()), six(7).view(Watched)]
    weakref.finalize(arrays[1], died.append, "gone")
    segment = client.create("run", [("a", (2, 3)), ("b", (2, 3))])
    segment.write(arrays)
    np.testing.assert_array_equal(segment.read()[1], six(7))
    assert died == ["gone"]


# --- Sequences ---------------------------------------------------------------------------


@pytest.mark.parametrize("arrays", [5, None, 1.0])
def test_what_is_no_sequence(segment, arrays):
    with pytest.raises(InvalidArgumentError, match="arrays must be a sequence, one for each var"):
        segment.write(arrays)


def test_any_sequence_will_do(segment):
    for arrays in ((six(),), iter([six()]), {0: six()}.values(), np.stack([six()])):
        segment.write([np.zeros((2, 3), np.float32)])
        segment.write(arrays)
        np.testing.assert_array_equal(segment.read()[0], six())


def test_what_a_generator_raises_comes_through(segment):
    def broken():
        yield six()
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        segment.write(broken())
    assert type(caught.value) is LookupError
