package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Joined is the open folder of a store that another process has open.
type Joined struct {
	Dir
	user int64
}

// Join opens, by its path on this host and its Token, the folder of a store that another
// process of the run has open.
func Join(o filesys.Opener, path, token string) (Joined, error) {
	d, err := OpenDir(o, path)
	if err == nil && d.f == nil {
		err = fmt.Errorf("open %s: %w", path, os.ErrNotExist)
	}
	if err != nil {
		return Joined{}, err
	}
	text, err := filesys.ReadFile(d.f, lockName, 1<<10)
	if err == nil && !slices.Contains(strings.Split(string(text), "\n"), token) {
		err = fmt.Errorf("%s on this host is not the folder that the run has open; give every process the same shared folder", path)
	}
	user := int64(filesys.NoOwner)
	if err == nil {
		user, err = d.f.Owner()
	}
	if err != nil {
		return Joined{}, errors.Join(err, d.Close())
	}
	return Joined{d, user}, nil
}

// Writing opens the folder of a Pending by its name.
func (j Joined) Writing(name string) (filesys.Folder, error) { return j.writing(name, j.user) }

// writing opens the folder of a Pending by its name. The folder must belong to user.
func (d Dir) writing(name string, user int64) (filesys.Folder, error) {
	f, err := d.f.Sub(name)
	if err != nil {
		return nil, err
	}
	st, err := f.Info()
	if err == nil && st.Owner != user {
		err = fmt.Errorf("%s belongs to user %d now, not to %d: somebody has put another folder in its place", f.Path(), st.Owner, user)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
