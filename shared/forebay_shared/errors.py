"""The error tree: one class per thing that can go wrong for a client, with its code and status.

    ForebayError
    ├── InvalidRequestError        400  invalid_request_error
    │   ├── ContextLengthError     400  context_length_exceeded
    │   ├── PreviousResponseError  400  previous_response_not_found
    │   └── UnsupportedError       400  unsupported_parameter
    ├── AuthenticationError        401  invalid_api_key
    ├── PermissionDeniedError      403  permission_denied
    ├── NotFoundError              404  not_found
    │   └── ModelNotFoundError     404  model_not_found
    ├── MethodNotAllowedError      405  method_not_allowed
    ├── ConflictError              409  conflict
    ├── PreconditionError          412  precondition_failed
    ├── PayloadTooLargeError       413  payload_too_large
    ├── MediaTypeError             415  unsupported_media_type
    ├── HeadersTooLargeError       431  headers_too_large
    ├── RateLimitError             429  rate_limit_exceeded        retryable
    ├── InternalError              500  internal_error
    │   ├── EngineError            500  engine_error
    │   └── UpstreamError          502  upstream_error             retryable
    ├── OverloadedError            503  overloaded                 retryable
    │   ├── NoWorkerError          503  no_worker                  retryable
    │   ├── WorkerLostError        503  worker_lost                retryable
    │   │   └── DrainingError      503  worker_draining            retryable
    │   └── BusError               503  bus_unavailable            retryable
    │       └── BusFullError       503  bus_full                   retryable
    └── DeadlineError              504  deadline_exceeded

It knows no HTTP library and no dialect: `gateway/api` turns an error into an envelope. A message is
written for the client: it names the field and what would be right, and holds no input, path, host
or secret.
"""

from typing import ClassVar


class ForebayError(Exception):
    """Base of all errors that a client may see."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(ForebayError):
    code = "invalid_value"
    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """`tokens`, at least, are asked for where a context holds `limit`; 0 where nobody counted."""

    code = "context_length_exceeded"
    tokens: int = 0
    limit: int = 0


class PreviousResponseError(InvalidRequestError):
    code = "previous_response_not_found"


class UnsupportedError(InvalidRequestError):
    code = "unsupported_parameter"


class AuthenticationError(ForebayError):
    code = "invalid_api_key"
    status = 401
    type = "authentication_error"


class PermissionDeniedError(ForebayError):
    code = "permission_denied"
    status = 403
    type = "permission_error"


class NotFoundError(ForebayError):
    code = "not_found"
    status = 404
    type = "invalid_request_error"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class MethodNotAllowedError(ForebayError):
    code = "method_not_allowed"
    status = 405
    type = "invalid_request_error"


class ConflictError(ForebayError):
    code = "conflict"
    status = 409
    type = "invalid_request_error"


class PreconditionError(ForebayError):
    code = "precondition_failed"
    status = 412
    type = "invalid_request_error"


class PayloadTooLargeError(ForebayError):
    code = "payload_too_large"
    status = 413
    type = "invalid_request_error"


class MediaTypeError(ForebayError):
    code = "unsupported_media_type"
    status = 415
    type = "invalid_request_error"


class HeadersTooLargeError(ForebayError):
    code = "headers_too_large"
    status = 431
    type = "invalid_request_error"


class RateLimitError(ForebayError):
    code = "rate_limit_exceeded"
    status = 429
    type = "rate_limit_error"
    retryable = True


class InternalError(ForebayError):
    pass


class EngineError(InternalError):
    code = "engine_error"


class UpstreamError(InternalError):
    """What an engine stands for failed, or cannot be used as the worker was told to."""

    code = "upstream_error"
    status = 502
    retryable = True


class OverloadedError(ForebayError):
    code = "overloaded"
    status = 503
    type = "overloaded_error"
    retryable = True


class NoWorkerError(OverloadedError):
    code = "no_worker"


class WorkerLostError(OverloadedError):
    code = "worker_lost"


class DrainingError(WorkerLostError):
    code = "worker_draining"


class BusError(OverloadedError):
    code = "bus_unavailable"


class BusFullError(BusError):
    code = "bus_full"


class DeadlineError(ForebayError):
    code = "deadline_exceeded"
    status = 504
    type = "timeout_error"


def _tree(root: type[ForebayError]) -> list[type[ForebayError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {cls.code: cls for cls in reversed(_tree(ForebayError))}


def from_code(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> ForebayError:
    """The error that a worker named by its code; an unknown code is an InternalError."""
    error = _BY_CODE.get(code, InternalError)
    return error(message, param=param, retry_after_s=retry_after_s)
