//go:build !unix

package main

import "time"

// lookAround sees nobody on this system.
func lookAround() look { return look{at: time.Now()} }
