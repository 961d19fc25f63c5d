"""Quality of one backend beside the other: the user's problem files, paired scores, long outputs followed for drift."""
