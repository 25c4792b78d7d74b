//go:build race

package filter

// raceEnabled: under the race detector sync.Pool drops at random, so allocations mean nothing, and everything
// takes ten times as long.
const raceEnabled = true
