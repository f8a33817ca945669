//go:build unix

package owned

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

func foreign(st fs.FileInfo) string {
	if s, ok := st.Sys().(*syscall.Stat_t); ok && int(s.Uid) != os.Geteuid() {
		return fmt.Sprintf("belongs to user %d, and this is user %d", s.Uid, os.Geteuid())
	}
	if st.Mode().Perm()&0o022 != 0 {
		return fmt.Sprintf("may be written by others (mode %03o); chmod go-w makes it the user's own", st.Mode().Perm())
	}
	return ""
}
