// Package proto holds the contracts between Sluice's programs and the Go code generated from them.
//
//	user/v1   what the bytes of a record hold
//	sync/v1   how datasets get from the business-logic service to resolvers; records are bytes here
//	store/v1  what the values of our bbolt files hold; records are bytes here too
//	admin/v1  the operator's side of both programs
//
// Generated files are committed. After editing a .proto file run `go generate ./proto` at the root of
// the module; buf lives in a module of its own (.ci/tools) to keep its dependencies out of go.mod.
package proto

//go:generate go tool -modfile=../.ci/tools/go.mod buf lint
//go:generate go tool -modfile=../.ci/tools/go.mod buf breaking --against ../.git#branch=main,subdir=proto
//go:generate go tool -modfile=../.ci/tools/go.mod buf generate
