//go:build !race

package usercache

const raceEnabled = false
