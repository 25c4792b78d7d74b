//go:build !race

package identify

const raceEnabled = false
