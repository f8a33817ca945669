package checkpoint

import "golang.org/x/sys/unix"

func umask(mask int) int { return unix.Umask(mask) }
