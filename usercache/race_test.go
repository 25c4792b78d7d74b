//go:build race

package usercache

const raceEnabled = true
