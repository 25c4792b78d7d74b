// Package usercache holds every user's settings on a resolver: in memory to answer by, on disk to start
// from.
package usercache
