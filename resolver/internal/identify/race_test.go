//go:build race

package identify

// raceEnabled: under the race detector sync.Pool drops at random, so allocations mean nothing.
const raceEnabled = true
