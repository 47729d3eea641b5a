"""What the kernels ask of a tensor before they take its address."""

import torch


def rows_of(tensor: torch.Tensor, num_rows: int | None) -> int:
    """How many of a tensor's rows are meant: all, unless it is said."""
    return len(tensor) if num_rows is None else min(num_rows, len(tensor))


def address_of(tensor: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Of a dense float32 tensor of exactly this shape."""
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(
            f"{layout(tensor)} on {tensor.device} do not fit: dense float32 of {tuple(shape)} on a CPU is needed"
        )
    return tensor.data_ptr()


def check_floats(*tensors: torch.Tensor) -> None:
    """Refuse what is not float32 on a CPU."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise TypeError(f"the kernels compute in float32 on a CPU, this is {layout(tensor)} on {tensor.device}")


def check_dense(*tensors: torch.Tensor) -> None:
    """Refuse what is not contiguous on a CPU."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"the kernels need this contiguous and on a CPU: {layout(tensor)} on {tensor.device}")


def layout(tensor: torch.Tensor) -> str:
    """Type, shape and strides, for an error."""
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
