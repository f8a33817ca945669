package store

import (
	"os"
	"path/filepath"
	"strings"
)

// FilesystemOf names the filesystem of a folder, or of its nearest existing parent, by type,
// source and mount point. The name is the same in every run on a machine.
func FilesystemOf(dir string) string {
	p, err := filepath.Abs(dir)
	if err != nil {
		return dir
	}
	for {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			p = real
			break
		}
		if p == filepath.Dir(p) {
			break
		}
		p = filepath.Dir(p)
	}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return p
	}
	return filesystemIn(string(text), p)
}

// filesystemIn finds path's mount in the text of mountinfo: see proc(5). If several are mounted on
// the same point, the last one hides the others.
func filesystemIn(mountinfo, path string) string {
	best, name := -1, path
	for _, line := range strings.Split(mountinfo, "\n") {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 2 {
			continue
		}
		at := unescape(l[4])
		if at != "/" && path != at && !strings.HasPrefix(path, at+"/") {
			continue
		}
		if len(at) >= best {
			best, name = len(at), r[0]+" "+unescape(r[1])+" "+at
		}
	}
	return name
}

var mountEscapes = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func unescape(s string) string { return mountEscapes.Replace(s) }
