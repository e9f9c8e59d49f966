package auth

import "errors"

// The errors of this package. The texts that clients see are for rpc to give.
var (
	ErrRootUserNotExist     = errors.New("auth: root user does not exist")
	ErrRootRoleNotExist     = errors.New("auth: root user does not have root role")
	ErrUserAlreadyExist     = errors.New("auth: user already exists")
	ErrUserEmpty            = errors.New("auth: user name is empty")
	ErrUserNotFound         = errors.New("auth: user not found")
	ErrRoleAlreadyExist     = errors.New("auth: role already exists")
	ErrRoleNotFound         = errors.New("auth: role not found")
	ErrRoleEmpty            = errors.New("auth: role name is empty")
	ErrPermissionNotGiven   = errors.New("auth: permission not given")
	ErrPermissionDenied     = errors.New("auth: permission denied")
	ErrRoleNotGranted       = errors.New("auth: role is not granted to the user")
	ErrPermissionNotGranted = errors.New("auth: permission is not granted to the role")
	// ErrNotEnabled says that nobody can authenticate while auth is off.
	ErrNotEnabled = errors.New("auth: authentication is not enabled")
	// ErrFailed says that name or password is wrong, not which of them.
	ErrFailed = errors.New("auth: authentication failed, invalid user ID or password")
	// ErrNoPassword says that a user has no password to authenticate with. Its
	// text reaches clients as it is, as etcd's does.
	ErrNoPassword = errors.New("auth: authentication failed, password was given for no password user")
	// ErrInvalidManagement says that a change would lock everybody out, or that a
	// permission's range is none.
	ErrInvalidManagement = errors.New("auth: invalid auth management")
	// ErrOldRevision says that users or roles changed since the caller was
	// authenticated; it must do so again.
	ErrOldRevision = errors.New("auth: revision in header is old")
	// ErrInvalidToken says that a token is unknown or no longer good.
	ErrInvalidToken = errors.New("auth: invalid auth token")
	// ErrTokenAhead says that a token is unknown, but may be made by an entry that
	// is not applied here yet.
	ErrTokenAhead = errors.New("auth: token of an entry that is not applied yet")
	// ErrBadHash says that a hashed password is not base64.
	ErrBadHash = errors.New("auth: hashed password is not base64")
)
