package admin

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-dns/sluice/resolver/internal/limits"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
)

// A FieldError is a field of a request that cannot be used.
type FieldError struct {
	Field, What string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.What }

// What implementations wrap so that a caller learns the kind of an error.
var (
	// ErrNotFound: there is no such thing.
	ErrNotFound = errors.New("not found")
	// ErrRefused: not in the present state.
	ErrRefused = errors.New("refused")
	// ErrBusy: not at the same time as what is under way.
	ErrBusy = errors.New("busy")
)

func missing(what string) error {
	return status.Errorf(codes.Unimplemented, "this resolver has no %s to administrate", what)
}

// coded is the one place where errors become codes.
func coded(err error) error {
	if err == nil {
		return nil
	}
	if st, ok := status.FromError(err); ok {
		return st.Err()
	}
	if e, ok := errors.AsType[*FieldError](err); ok {
		return invalid(e.Field, err.Error(), e.What)
	}
	if e, ok := errors.AsType[*limits.Error](err); ok {
		return invalid("value", err.Error(), e.What)
	}
	switch {
	case errors.Is(err, rrcache.ErrDump):
		return invalid("data", err.Error(), err.Error())
	case errors.Is(err, ErrNotFound):
		return status.Error(codes.NotFound, err.Error())
	case errors.Is(err, ErrRefused):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, ErrBusy):
		return status.Error(codes.ResourceExhausted, err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	}
	return status.Error(codes.Internal, err.Error())
}

func invalid(field, message, what string) error {
	st := status.New(codes.InvalidArgument, message)
	if with, err := st.WithDetails(&errdetails.BadRequest{
		FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: what}},
	}); err == nil { // fails only for details that cannot be encoded
		st = with
	}
	return st.Err()
}

// unary surrounds each call that is no stream.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (resp any, err error) {
	if err := s.allow(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	defer s.recovered(info.FullMethod, &err)
	resp, err = handle(ctx, req)
	return resp, coded(err)
}

// stream surrounds each stream.
func (s *Server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	if err := s.allow(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	defer s.recovered(info.FullMethod, &err)
	return coded(handle(srv, stream))
}

// recovered makes an error of a panic: looking at a resolver must not stop it.
func (s *Server) recovered(method string, err *error) {
	v := recover()
	if v == nil {
		return
	}
	if s.o.Panicked != nil {
		s.o.Panicked()
	}
	s.o.Logger.Error("a panic was recovered in an admin call; please report it with this line", "method", method, "panic", v, "stack", string(debug.Stack()))
	*err = status.Error(codes.Internal, fmt.Sprintf("%s failed by a fault of the program; its log says more", method))
}
