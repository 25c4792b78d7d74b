package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// A failure ends a command. Its fields are what -o json prints.
type failure struct {
	Code    string `json:"code"` // a gRPC code such as NOT_FOUND; INVALID_ARGUMENT for a bad command line
	Message string `json:"message"`
	Field   string `json:"field"` // of the request, or the flag; "" if it is about none

	exit int
	more []*failure // said before it
}

func (f *failure) Error() string { return f.Message }

// usagef is about the command line.
func usagef(field, format string, args ...any) error {
	return &failure{Code: "INVALID_ARGUMENT", Message: fmt.Sprintf(format, args...), Field: field, exit: exitUsage}
}

// failedf is about something else on this machine, such as a file.
func failedf(format string, args ...any) error {
	return &failure{Code: "UNKNOWN", Message: fmt.Errorf(format, args...).Error(), exit: exitFailed}
}

// refused turns the error of a call to a server into a failure.
func refused(addr string, err error) error {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*failure](err); ok {
		return f
	}
	st := status.Convert(err)
	f := &failure{Code: codeName(st.Code()), Message: st.Message(), exit: exitFailed}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.BadRequest:
			if v := d.GetFieldViolations(); len(v) > 0 {
				f.Field = v[0].GetField()
			}
		case *errdetails.RetryInfo:
			f.Message += fmt.Sprintf("; try again in %v", d.GetRetryDelay().AsDuration())
		}
	}
	switch st.Code() {
	case codes.Unavailable:
		if _, why, ok := strings.Cut(f.Message, "Error while dialing: "); ok {
			// The rest is gRPC's wrapping, and no server has said anything.
			f.Message = strings.TrimSuffix(why, `"`) + "; try: start it, or name another with --service or --resolver"
		} else if strings.Contains(f.Message, "reading server preface") {
			// Something listens there and speaks another protocol, or takes TLS only.
			f.Message += "; try: the address that admin.listen, or listen of sluice-bizd, has, and --ca if it has TLS"
		}
		f.Message = fmt.Sprintf("%s cannot be reached: %s", addr, f.Message)
	case codes.DeadlineExceeded:
		f.Message = fmt.Sprintf("%s did not answer in time: %s", addr, f.Message)
	case codes.Unimplemented:
		// A resolver and the service each have what the other has not, and their ports are neighbours.
		if name, ok := strings.CutPrefix(f.Message, "unknown service "); ok {
			flag := "--service"
			if name == adminv1.ResolverService_ServiceDesc.ServiceName {
				flag = "--resolver"
			}
			f.Message += "; try: another address with " + flag
		}
		f.Message = fmt.Sprintf("%s does not do this: %s", addr, f.Message)
	}
	return f
}

// codeName writes a code as the gRPC documents do: NOT_FOUND.
func codeName(c codes.Code) string {
	if name := code.Code_name[int32(c)]; name != "" {
		return name
	}
	return c.String()
}

// complain says what went wrong and returns the exit status.
func (a *app) complain(err error) int {
	f, ok := errors.AsType[*failure](err)
	if !ok {
		f = &failure{Code: "UNKNOWN", Message: err.Error(), exit: exitFailed}
	}
	for _, one := range append(f.more, f) {
		if one.Message == "" {
			continue
		}
		if !a.json {
			fmt.Fprintf(a.stderr, "sluicectl: %s\n", clean(one.Message))
			continue
		}
		b, err := json.Marshal(one)
		if err != nil {
			panic(err) // strings can always be marshalled
		}
		fmt.Fprintf(a.stderr, "%s\n", b)
	}
	return f.exit
}

// both joins failures of several servers; the last decides the exit status.
func both(err, next error) error {
	if err == nil {
		return next
	}
	if next == nil {
		return err
	}
	f, _ := errors.AsType[*failure](err)
	g, _ := errors.AsType[*failure](next)
	g.more = append(append(f.more, f), g.more...)
	f.more = nil
	return g
}
