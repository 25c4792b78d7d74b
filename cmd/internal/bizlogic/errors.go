package bizlogic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// invalid is INVALID_ARGUMENT naming the field.
func invalid(field, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	return withDetails(status.Newf(codes.InvalidArgument, "%s: %s", field, what),
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: what}}})
}

func notFound(what, id string) error {
	return status.Errorf(codes.NotFound, "there is no %s %q", what, id)
}

func exists(what, id string) error {
	return status.Errorf(codes.AlreadyExists, "%s %q exists already", what, id)
}

func listExists(id string) error {
	return status.Errorf(codes.AlreadyExists, "list %q exists already; add it with --replace to give it the new text", id)
}

func refused(format string, args ...any) error {
	return status.Errorf(codes.FailedPrecondition, format, args...)
}

// comeBack is RESOURCE_EXHAUSTED with the time after which to try again.
func comeBack(after time.Duration, more []protoadapt.MessageV1, format string, args ...any) error {
	details := append([]protoadapt.MessageV1{&errdetails.RetryInfo{RetryDelay: durationpb.New(after)}}, more...)
	return withDetails(status.Newf(codes.ResourceExhausted, format, args...), details...)
}

func withDetails(st *status.Status, details ...protoadapt.MessageV1) error {
	if with, err := st.WithDetails(details...); err == nil { // fails only for details that cannot be encoded
		st = with
	}
	return st.Err()
}

// checkRevision is what if_revision asks for.
func checkRevision(have, want uint64) error {
	if want != 0 && have != want {
		return status.Errorf(codes.Aborted, "the record is at revision %d, not %d; read it again", have, want)
	}
	return nil
}

var errClosing = status.Error(codes.Unavailable, "the service is closing; try again")

// storing wraps an error of the store for a caller.
func storing(err error) error {
	if _, ok := status.FromError(err); ok {
		return err
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(err).Err()
	}
	if noRoom(err) {
		return status.Errorf(codes.Internal, "storing: %v; nothing was changed; make room there and try again", err)
	}
	return status.Errorf(codes.Internal, "storing: %v; nothing was changed", err)
}

// ours reports whether an error is that of our own store or disk.
func ours(err error) bool { return status.Code(err) == codes.Internal }

// reading wraps an error of the store met while reading.
func reading(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Errorf(codes.Internal, "reading the store: %v", err)
}

// statusMessage is the message of an error, without the code if it is a status.
func statusMessage(err error) string {
	if st, ok := status.FromError(err); ok {
		return st.Message()
	}
	return err.Error()
}
